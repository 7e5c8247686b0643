"""What a command runs with: values from weak to strong, and where each came from."""

from __future__ import annotations

from typing import Any

import pytest

from piecework.cli.arguments import regular
from piecework.cli.config import own_names, parse_ranges, read_pair
from piecework.cli.flags import CompileFlags, StoreFlags
from piecework.cli.settings import Settings, gather
from piecework.cli.store import parse_size
from piecework.env import Environment
from piecework.errors import OptionError

HOME = Environment(home="/home/somebody")


def settings(environment: Environment = HOME, store: StoreFlags | None = None, **flags: Any) -> Settings:
    return gather(CompileFlags(**flags), store or StoreFlags(), environment)


def test_spellings_of_other_engines_become_flags() -> None:
    given = ["generate", "M", "-O3", "-O", "1", "-O=2", "-cc.mode=0", "-cc.split_ops", "[]", "-cc", "{}", "-cc={}"]
    assert regular(given) == [
        "generate", "M", "--optimization-level=3", "--optimization-level=1", "--optimization-level=2",
        "--compilation-pair=mode=0", "--compilation-pair=split_ops=[]",
        "--compilation-config={}", "--compilation-config={}",
    ]  # fmt: skip
    assert regular(["--compilation-config.mode=3"]) == ["--compilation-pair=mode=3"]
    assert regular(["--", "-O3"]) == ["--", "-O3"]


def test_each_value_and_its_origin() -> None:
    found = settings(
        Environment(home="/h", strict=True, store="/from/environment"),
        mode="2",
        compilation_config=['{"mode": 3, "single_sizes": [8], "max_num_batched_tokens": 512}'],
        compilation_pair=["single_sizes=[16]"],
        optimization_level=3,
    )
    assert (found.options.mode, found.options.compiler) == ("trace_once", "inductor")
    assert found.options.single_sizes == (16,)
    assert (found.options.strict, found.options.max_num_batched_tokens) == (True, 512)
    shown = {name: each["origin"] for name, each in found.as_dict().items()}
    assert shown["mode"] == "command line --mode"
    assert shown["single_sizes"] == "config -cc.single_sizes"
    assert shown["max_num_batched_tokens"] == "config --compilation-config"
    assert shown["optimization_level"] == "command line --optimization-level"
    assert shown["compiler"] == "level table -O3"
    assert shown["strict"] == "environment PIECEWORK_STRICT"
    assert shown["store"] == "environment PIECEWORK_STORE"
    assert shown["size_one"] == "default"


def test_a_flag_of_the_store_wins_over_the_environment() -> None:
    found = settings(Environment(home="/h", store="/a", strict=True), StoreFlags(store="memory", strict=False))
    assert (found.store.store, found.options.strict) == ("memory", False)
    assert found.origins["store"] == "command line --store"
    assert settings().store.store == "/home/somebody/.cache/piecework/store"


def test_eager_is_level_zero() -> None:
    spellings: tuple[dict[str, Any], ...] = (
        {"enforce_eager": True}, {"optimization_level": 0}, {"mode": "none"}, {"compilation_pair": ["mode=0"]}
    )  # fmt: skip
    for flags in spellings:
        assert settings(**flags).options.mode == "none", flags
    with pytest.raises(OptionError, match="contradict each other"):
        settings(enforce_eager=True, mode="piecewise")
    assert settings(enforce_eager=True, mode="none").options.mode == "none"


def test_names_of_vllm() -> None:
    found = settings(
        compilation_config=[
            '{"mode": "VLLM_COMPILE", "backend": "eager", "splitting_ops": ["a::b"], "compile_sizes": [4], '
            '"compile_ranges_endpoints": [16, 64], "max_num_batched_tokens": 256}'
        ]
    ).options
    assert (found.mode, found.compiler, found.split_ops_only) == ("piecewise", "eager", ("a::b",))
    assert found.single_sizes == (4,)
    assert found.ranges == ((1, 16), (17, 64), (65, 256))
    with pytest.raises(OptionError, match="given twice"):
        own_names({"backend": "eager", "compiler": "eager"}, 8)


@pytest.mark.parametrize(
    ("text", "maximum", "ranges"),
    [
        ("1-64,65-256", 256, ((1, 64), (65, 256))),
        ("64", 256, ((1, 64), (65, 256))),
        ("64, 256", 256, ((1, 64), (65, 256))),
        ("512", 256, ((1, 256),)),
    ],
)
def test_ranges_as_text(text: str, maximum: int, ranges: Any) -> None:
    assert parse_ranges(text, maximum) == ranges


@pytest.mark.parametrize("text", ["", "a", "1-2-3", "1-", "1:2", "0", "1-2,3"])
def test_what_are_no_ranges(text: str) -> None:
    with pytest.raises(OptionError, match="ranges"):
        parse_ranges(text, 64)


def test_ranges_beyond_the_default_maximum_follow_it() -> None:
    found = settings(max_num_batched_tokens=16384)
    assert found.options.ranges == ((1, 64), (65, 16384))
    assert found.origins["ranges"] == "level table -O2"


def test_pairs_are_json_where_they_can_be() -> None:
    assert read_pair("mode=3") == ("mode", 3)
    assert read_pair("compiler=eager") == ("compiler", "eager")
    assert read_pair("split_ops=[\"a::b\"]") == ("split_ops", ["a::b"])
    with pytest.raises(OptionError, match="has no value"):
        read_pair("mode")


def test_both_lists_of_operators_are_one_too_many() -> None:
    assert settings(split_ops_only="").options.split_ops_only == ()
    assert settings(split_ops="a::b, c::d").options.split_ops == ("a::b", "c::d")
    with pytest.raises(OptionError, match="both given"):
        settings(split_ops="a::b", compilation_config=['{"split_ops_only": []}'])


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1000", 1000), ("2K", 2048), ("1.5M", 1572864), ("1GiB", 1 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "inf", "nan", "1X"])
def test_what_are_no_sizes(text: str) -> None:
    with pytest.raises(OptionError, match="is no size"):
        parse_size(text)
