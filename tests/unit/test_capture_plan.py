from __future__ import annotations

import dataclasses
import re

import pytest

from piecework.capture_options import BACKENDS, CUDAGRAPH_MODES, CaptureOptions, describe_options, from_familiar
from piecework.errors import CaptureError, OptionError
from piecework.values.ladder import covering, ladder, uncovered
from piecework.values.phases import (
    CAPTURES,
    DECODE,
    FULL,
    PIECEWISE,
    PREFILL,
    TABLE,
    PhaseCapture,
    check_support,
    default_capture,
    lowered_capture,
    unsupported,
)
from piecework.values.shapes import Range


def test_the_default_ladder_up_to_256_has_35_sizes() -> None:
    sizes = [rung.size for rung in ladder(256)]
    assert sizes == [1, 2, 4, *range(8, 257, 8)]
    assert len(sizes) == 35


@pytest.mark.parametrize("maximum", [1, 2, 3, 5, 100, 250, 257, 513, 1000, 2047, 8192])
def test_a_ladder_holds_the_largest_size_and_serves_every_count_once(maximum: int) -> None:
    rungs = ladder(maximum)
    assert rungs[-1].size == maximum
    assert [count for rung in rungs for count in range(rung.serves.low, rung.serves.high + 1)] == list(
        range(1, maximum + 1)
    )
    assert all(rung.serves.high == rung.size for rung in rungs)


def test_padding_waste_of_each_rung_is_known() -> None:
    by_size = {rung.size: rung for rung in ladder(512)}
    assert by_size[16].largest_waste == 7 / 16
    assert by_size[16].mean_waste == 3.5 / 16
    assert by_size[1].largest_waste == 0
    assert max(rung.largest_waste for rung in ladder(8192) if rung.size > 128) < 0.12


def test_sizes_off_the_grid_keep_the_largest() -> None:
    rungs = ladder(30, (1, 8, 16))
    assert [(r.size, r.serves) for r in rungs] == [
        (1, Range(1, 1)), (8, Range(2, 8)), (16, Range(9, 16)), (30, Range(17, 30))
    ]  # fmt: skip


def test_what_no_size_serves_is_listed() -> None:
    rungs = ladder(8, (2, 8))
    assert covering(rungs, 10) == [0, 2, 2, 8, 8, 8, 8, 8, 8, 0, 0]
    assert uncovered(rungs, 12) == (Range(9, 12),)
    assert uncovered(rungs[1:], 12) == (Range(1, 2), Range(9, 12))
    assert uncovered(rungs, 8) == ()


def test_a_size_above_the_maximum_is_refused() -> None:
    with pytest.raises(OptionError, match=r"captured size `64` lies outside \[1, 32\]"):
        ladder(32, (64,))


def test_defaults_by_platform_and_mode() -> None:
    assert {k: v[0] for k, v in default_capture("cuda", "piecewise").items()} == {DECODE: "full", PREFILL: "piecewise"}
    assert {k: v[0] for k, v in default_capture("cuda", "none").items()} == {DECODE: "full", PREFILL: "breakable"}
    assert {k: v[0] for k, v in default_capture("cuda", "trace_once").items()} == {DECODE: "full", PREFILL: "none"}
    for mode in ("none", "stock", "trace_once", "piecewise"):
        assert {v[0] for v in default_capture("cpu", mode).values()} == {"none"}
        for phase, (capture, reason) in default_capture("cuda", mode).items():
            assert TABLE[mode, capture] == "", phase
            assert reason


def test_the_table_names_every_pair() -> None:
    assert set(TABLE) == {
        (mode, capture) for mode in ("none", "stock", "trace_once", "piecewise") for capture in CAPTURES
    }
    legal = {pair for pair, why in TABLE.items() if not why}
    assert legal == {
        ("none", "none"), ("none", "full"), ("none", "breakable"), ("stock", "none"), ("stock", "full"),
        ("trace_once", "none"), ("trace_once", "full"), ("piecewise", "none"), ("piecewise", "full"),
        ("piecewise", "piecewise"),
    }  # fmt: skip


@pytest.mark.parametrize("pair", sorted(pair for pair, why in TABLE.items() if why))
def test_what_cannot_be_honoured_is_refused_with_the_reason(pair: tuple[str, str]) -> None:
    mode, capture = pair
    with pytest.raises(OptionError) as caught:
        CaptureOptions(decode=capture, prefill="none").resolve("cuda", mode, 512)
    assert TABLE[pair] in caught.value.message
    assert re.search("use `(full|piecewise|breakable)`", caught.value.hint)


def test_capture_on_a_processor_without_graphs_is_refused() -> None:
    with pytest.raises(OptionError, match="decode cannot be captured `full` on `cpu`: there are no CUDA graphs"):
        CaptureOptions(decode="full").resolve("cpu", "piecewise", 512)
    assert CaptureOptions().resolve("cpu", "piecewise", 512).phases == ()


MEANINGLESS = [
    ({"decode": "none", "decode_max": 8}, "decode_max"),
    ({"prefill": "none", "prefill_sizes": (8,)}, "prefill_sizes"),
    ({"decode": "none", "tokens_per_sequence": 2}, "tokens_per_sequence"),
    ({"whole_forward_mode": "default"}, "whole_forward_mode"),
    ({"decode": "piecewise", "whole_forward_max": 8}, "whole_forward_max"),
    ({"decode": "piecewise", "lower": True}, "lower"),
    ({"decode": "none", "prefill": "none", "memory_budget_bytes": 1}, "memory_budget_bytes"),
    ({"decode": "none", "prefill": "none", "results": "borrowed"}, "results"),
    ({"decode": "none", "prefill": "none", "check_addresses": True}, "check_addresses"),
    ({"decode": "none", "prefill": "none", "when": "idle"}, "when"),
]


@pytest.mark.parametrize(("given", "name"), MEANINGLESS, ids=[name + str(len(g)) for g, name in MEANINGLESS])
def test_an_option_without_a_meaning_is_refused(given: dict[str, object], name: str) -> None:
    with pytest.raises(OptionError, match=f"`{name}` has no meaning here"):
        CaptureOptions(**given).resolve("cuda", "piecewise", 512)  # type: ignore[arg-type]


def test_no_option_is_ignored_on_a_platform_that_captures_nothing() -> None:
    skipped = {"decode", "prefill"}
    values = {"decode_max": 8, "prefill_max": 8, "decode_sizes": (8,), "prefill_sizes": (8,),
              "decode_compiler": "eager", "prefill_compiler": "eager", "tokens_per_sequence": 1, "lower": True,
              "whole_forward_max": 8,
              "whole_forward_mode": "default", "check_addresses": True, "memory_budget_bytes": 8, "when": "idle",
              "results": "copied"}  # fmt: skip
    assert set(values) | skipped == {f.name for f in dataclasses.fields(CaptureOptions)}
    for name, value in values.items():
        with pytest.raises(OptionError, match="no meaning here"):
            CaptureOptions(**{name: value}).resolve("cpu", "piecewise", 512)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CUDAGRAPH_MODES)
def test_names_that_users_of_vllm_know(name: str) -> None:
    plan = from_familiar({"cudagraph_mode": name}).resolve("cuda", "piecewise", 512)
    assert (plan.decode.capture, plan.prefill.capture) == tuple(CUDAGRAPH_MODES[name].values())
    assert from_familiar({"cudagraph_mode": name.lower()}) == from_familiar({"cudagraph_mode": name})


@pytest.mark.parametrize(
    ("backend", "mode"),
    [("disabled", "piecewise"), ("full", "piecewise"), ("breakable", "none"), ("tc_piecewise", "piecewise")],
)
def test_names_that_users_of_sglang_know(backend: str, mode: str) -> None:
    plan = from_familiar({"cuda_graph_backend_prefill": backend}).resolve("cuda", mode, 512)
    assert plan.prefill.capture == BACKENDS[backend]
    assert plan.decode.capture == "full"


def test_further_familiar_names() -> None:
    plan = from_familiar({"cuda_graph_backend_prefill": "tc_piecewise", "cuda_graph_tc_compiler": "eager"}).resolve(
        "cuda", "piecewise", 512
    )
    assert plan.prefill.compiler == "eager"
    plan = from_familiar({"enable_torch_compile": True}).resolve("cuda", "piecewise", 512)
    assert (plan.whole_forward.maximum, plan.whole_forward.compiler_mode) == (32, "max-autotune-no-cudagraphs")
    plan = from_familiar({"enable_torch_compile": True, "torch_compile_max_bs": 8}).resolve("cuda", "piecewise", 512)
    assert plan.whole_forward.maximum == 8
    plan = from_familiar({"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 2]}).resolve(
        "cuda", "piecewise", 512
    )
    assert plan.decode.sizes == (2, 4)
    plan = from_familiar({"cuda_graph_bs_decode": [1, 2], "cuda_graph_max_bs_prefill": 64}).resolve(
        "cuda", "piecewise", 512
    )
    assert (plan.decode.sizes, plan.prefill.sizes[-1]) == ((1, 2), 64)
    for name in ("enforce_eager", "disable_cuda_graph"):
        assert from_familiar({name: True}).resolve("cuda", "none", 512).phases == ()


CONTRADICTIONS = [
    ({"cudagraph_mode": "FULL", "enforce_eager": True}, "contradict each other about `decode`"),
    ({"cudagraph_mode": "FULL", "cuda_graph_backend_prefill": "breakable"}, "contradict each other about `prefill`"),
    ({"cuda_graph_tc_compiler": "inductor"}, "`cuda_graph_tc_compiler` has no meaning here"),
    ({"torch_compile_max_bs": 8}, "`torch_compile_max_bs` has no meaning here"),
    ({"cudagraph_mode": "FULLL"}, "`cudagraph_mode` is `FULLL`"),
    ({"cuda_graph_backend_decode": "brakable"}, "`cuda_graph_backend_decode` is `brakable`"),
    ({"cudagraph_mod": "FULL"}, "capture option `cudagraph_mod` is unknown"),
]


@pytest.mark.parametrize(("given", "message"), CONTRADICTIONS)
def test_contradictions_of_familiar_names_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        from_familiar(given)


def test_a_size_beyond_what_the_program_serves_is_refused() -> None:
    with pytest.raises(OptionError, match="decode size `1024` is larger than the `512` tokens"):
        CaptureOptions(decode_max=1024).resolve("cuda", "piecewise", 512)


def test_an_opaque_op_that_may_not_be_captured_is_named() -> None:
    support = {
        "ns::attend": "one_token_decode",
        "ns::save": "never",
        "ns::norm": "always",
        "ns::draft": "uniform_decode",
    }
    one = PhaseCapture(DECODE, FULL)
    assert unsupported(one, support) == ("ns::save",)
    assert unsupported(PhaseCapture(DECODE, FULL, tokens_per_sequence=3), support) == ("ns::attend", "ns::save")
    assert unsupported(PhaseCapture(PREFILL, FULL), support) == ("ns::attend", "ns::save", "ns::draft")
    assert unsupported(PhaseCapture(PREFILL, PIECEWISE), support) == ()
    with pytest.raises(CaptureError, match="decode cannot be captured `full`: `ns::save`"):
        check_support(one, support, unsupported(one, support))
    assert lowered_capture("piecewise") == "piecewise"
    assert lowered_capture("none") == "breakable"


def test_every_option_says_what_it_is() -> None:
    assert all(len(text) > 10 for _, text in describe_options())
    assert all(f.metadata["keyed"] is False for f in dataclasses.fields(CaptureOptions))
