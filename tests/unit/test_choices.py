"""Options of all kinds: a name that is none is told with the nearest one, and nonsense where it is made."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from piecework.capture_options import CaptureOptions
from piecework.cli.flags import CompileFlags, StoreFlags
from piecework.cli.settings import gather
from piecework.engine.options import EngineOptions
from piecework.engine.sequence import SamplingParameters
from piecework.env import Environment
from piecework.errors import OptionError
from piecework.options import CompileOptions
from piecework.server.options import ServeOptions

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "typed", "meant"),
    [
        (CompileOptions, "compilr", "compiler"),
        (CaptureOptions, "decod", "decode"),
        (EngineOptions, "page_sise", "page_size"),
        (SamplingParameters, "temprature", "temperature"),
        (ServeOptions, "prt", "port"),
    ],
)
def test_a_name_that_is_none_is_told_with_the_nearest(kind: Any, typed: str, meant: str) -> None:
    with pytest.raises(OptionError) as told:
        kind(**{typed: 1})
    assert (told.value.message, told.value.exit_code) == (f"option `{typed}` is unknown", 2)
    assert told.value.hint.startswith(f"did you mean `{meant}`?")
    with pytest.raises(OptionError, match="values are given for"):
        kind(*[None] * 99)
    with pytest.raises(OptionError, match="is unknown"):
        dataclasses.replace(kind(), **{typed: 1})


def test_options_stay_dataclasses() -> None:
    options = CompileOptions("trace_once", compiler="eager")
    assert (options.mode, options.compiler) == ("trace_once", "eager")
    assert copy.deepcopy(options) == options and hash(options) == hash(dataclasses.replace(options))


# No string that is close to one that means something: what is close is told with it, above and in the test of the CLI.
NONSENSE: dict[Any, dict[str, tuple[Any, ...]]] = {
    CompileOptions: {
        "mode": (7, -1, "", True, 1.0, NAN, "fast"),
        "compiler": ("", "tvm", 3),
        "max_num_batched_tokens": (0, -1, 1.5, NAN, "8", True, 1 << 40),
        "ranges": (
            (), ((8, 1),), ((1, 8), (4, 64)), ((1, 8), (10, 64)), ((0, 8),), ((-3, 8),), ((1.5, 8),), ((True, 8),),
            "1-8", 5, ((1, 8, 9),), ((1, 8), (1, 8)), ((1, NAN),),
        ),
        "single_sizes": ((0,), (-1,), (2.0,), (True,), 3, "8", {8: 1}, (NAN,)),
        "lazy_sizes": ((0,), (-1,), ("8",), 3),
        "size_one": (1, "yes", None),
        "split_ops": (("",), ("attention",), ("a.b",), "a::b", (3,), ("a::",)),
        "split_ops_only": (("",), "a::b", ("a::b", None)),
        "partition": ("", "fxx", None, 3),
        "passes": (("",), (3,), "no_ops", 3),
        "autotune": (1, "yes"),
        "custom_ops": (("",), ("+",), ("norm",), ("all", "none"), ("+a", "-a"), "all"),
        "tensor_parallel_size": (0, -2, 1.0, True),
        "optimization_level": (4, -1, True, "2"),
        "strict": (1, "no"),
        "compile_budget_s": (-1, NAN, INF, "3", True),
        "verify": (0, None),
        "drift_every": (-1, 0.5),
        "compile_threads": (0, -1, 1 << 30),
        "debug_folder": (3, "a\0b", None),
    },
    CaptureOptions: {
        "decode": ("", "ful", 3), "prefill": ("all",), "decode_max": (0, -1, 1.5, True), "decode_sizes": ((), (0,), 3),
        "prefill_sizes": ("12", (1.0,)), "decode_compiler": (3,), "tokens_per_sequence": (0,), "lower": (1,),
        "whole_forward_max": (-1,), "whole_forward_mode": (3,), "check_addresses": ("no",),
        "memory_budget_bytes": (-1, NAN), "when": ("now",), "results": ("mine",),
    },
    EngineOptions: {
        "max_num_sequences": (0, 1.5), "max_num_batched_tokens": (1, NAN), "max_length": (-1,), "page_size": (0, True),
        "num_pages": (-1,), "memory_fraction": (-0.1, 1.5, NAN, "1"), "share_prefixes": (1,), "enforce_eager": (None,),
        "wait_for": ("", "later"), "compile_nice": (20, -1), "idle_ms": (-1, NAN, INF), "rank_timeout_s": (0, NAN),
        "step_ahead": ("yes", True),
    },
    SamplingParameters: {
        "max_tokens": (0, -1, 1.5, True), "min_tokens": (-1, 17), "temperature": (-1, NAN, INF, "1"),
        "top_k": (-1, 0.5), "top_p": (0, 1.5, NAN), "min_p": (-0.1, 2), "presence_penalty": (3, NAN),
        "frequency_penalty": (-3,), "repetition_penalty": (0, -1), "seed": (1.5, "x"), "stop": (("",), 3, (4,)),
        "stop_token_ids": (3, ("a",), (-1,), (True,)), "ignore_eos": (1,), "logprobs": (-1, 21, True),
        "n": (0, 129, True), "json_schema": ("{", "[]", 3),
    },
    ServeOptions: {
        "host": ("", 3), "port": (-1, 70000, True, "80"), "open_port": ("later",), "max_body_bytes": (0, 1.5),
        "max_requests": (0, NAN), "max_choices": (0,), "body_timeout_s": (0, -1, NAN, INF, "1"),
        "write_timeout_s": (0,), "drain_timeout_s": (-1, NAN), "health_timeout_s": (0,), "api_keys": (("",), "secret"),
        "served_model_names": ("name", ("",)),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, names in NONSENSE.items() for name, values in names.items() for value in values],
)
def test_nonsense_is_refused_where_it_is_made(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(OptionError) as told:
        kind(**{name: value})
    assert told.value.hint and told.value.message


def test_every_option_has_nonsense() -> None:
    untried = {
        kind.__name__: [each.name for each in dataclasses.fields(kind) if each.name not in names]
        for kind, names in NONSENSE.items()
    }
    assert untried == {
        "CompileOptions": ["split_at_guards", "evaluate_guards", "merge_consecutive"],  # true or false, as the others
        "CaptureOptions": ["prefill_max", "prefill_compiler"],
        "EngineOptions": [],
        "SamplingParameters": [],
        "ServeOptions": [],
    }


def test_what_means_the_same_is_the_same() -> None:
    options = CompileOptions(ranges=[[9, 64], [1, 8]], single_sizes=iter([8, 4, 8]), debug_folder=Path("here"))  # type: ignore[arg-type]
    assert options.ranges == ((1, 8), (9, 64))
    assert (options.single_sizes, options.debug_folder) == ((4, 8), "here")


@pytest.mark.parametrize(
    ("pair", "name", "value"),
    [
        ("splitting_ops=a::b,c::d", "split_ops_only", ("a::b", "c::d")),
        ('splitting_ops=["a::b"]', "split_ops_only", ("a::b",)),
        ("split_ops=a::b", "split_ops", ("a::b",)),
        ("compile_sizes=4,8", "single_sizes", (4, 8)),
        ("single_sizes=4", "single_sizes", (4,)),
        ("compile_ranges_endpoints=64,128", "ranges", ((1, 64), (65, 128), (129, 8192))),
        ("compile_ranges_split_points=64", "ranges", ((1, 64), (65, 8192))),
        ("ranges=1-64,65-8192", "ranges", ((1, 64), (65, 8192))),
        ("use_inductor_graph_partition=True", "partition", "inductor"),
        ("custom_ops=none,+norm", "custom_ops", ("none", "+norm")),
        ("level=3", "mode", "piecewise"),
    ],
)
def test_lists_of_a_pair_are_written_with_commas_or_as_json(pair: str, name: str, value: Any) -> None:
    found = gather(CompileFlags(compilation_pair=[pair]), StoreFlags(), Environment(home="/h"))
    assert getattr(found.options, name) == value
    assert found.origins[name] == f"config -cc.{name}"


@pytest.mark.parametrize(
    ("flags", "said", "hint"),
    [
        ({"compilation_pair": ["splitting_ops=a,b"]}, "`-cc.splitting_ops` holds `a`", "`namespace::name`"),
        ({"compilation_pair": ["splitting_ops=3"]}, "`-cc.splitting_ops` is `3`", "a list of names"),
        ({"compilation_pair": ["compile_sizes=a"]}, "`-cc.compile_sizes` is `a`", "whole numbers"),
        ({"compilation_pair": ["use_inductor_graph_partition=maybe"]}, "`-cc.use_inductor_graph_partition`", "true"),
        ({"compilation_config": ['{"splitting_ops": 3}']}, "`splitting_ops` is `3`", "a list of names"),
        ({"compilation_config": ['{"level": 9}']}, "mode `9` is unknown (given as `level`)", "0 to 3"),
        ({"compilation_config": ['{"cudagraph_mode": "FULL"}']}, "one of capture", "`--cudagraph-mode`"),
        ({"split_ops": "attention"}, "`--split-ops` holds `attention`", "`namespace::name`"),
        ({"max_num_batched_tokens": 0}, "`--max-num-batched-tokens` is `0`", "from 1 to"),
        (
            {"split_ops": "a::b", "compilation_pair": ["splitting_ops=a::b"]},
            "`--split-ops` and `-cc.splitting_ops` are both given",
            "give one",
        ),
    ],
)
def test_an_error_names_what_was_typed(flags: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(OptionError) as told:
        gather(CompileFlags(**flags), StoreFlags(), Environment(home="/h"))
    assert said in told.value.message and hint in told.value.hint
