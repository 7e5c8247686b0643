"""Which token counts are served by what; and what the command line says of capture."""

from __future__ import annotations

import pytest

from piecework.capture_options import CaptureOptions
from piecework.cli.capture import capture_lines, check_capture
from piecework.cli.flags import CaptureFlags
from piecework.errors import OptionError
from piecework.options import CompileOptions
from piecework.values.coverage import coverage

OPTIONS = CompileOptions(max_num_batched_tokens=512).resolve()


def test_each_count_is_in_one_row_of_each_phase() -> None:
    plan = CaptureOptions(decode_max=100, prefill_sizes=(64, 256)).resolve("cuda", "piecewise", 512)
    rows = coverage(plan, 512)
    for phase in ("decode", "prefill"):
        counts = [n for row in rows if row.phase == phase for n in range(row.counts.low, row.counts.high + 1)]
        assert sorted(counts) == list(range(1, 513))


def test_rows_say_what_serves_and_why_nothing_does() -> None:
    plan = CaptureOptions(decode_sizes=(1, 2, 4), prefill="none", when="idle").resolve("cuda", "piecewise", 8)
    rows = coverage(plan, 8, {("decode", 4)}, {("decode", 1): "size 1 does not fit the memory budget"})
    assert [str(row) for row in rows] == [
        "decode 1: without graphs: size 1 does not fit the memory budget",
        "decode 2: full, size 2; to be captured (idle)",
        "decode 3-4: full, size 4, 25% padding at most; captured",
        "decode 5-8: without graphs: no captured size serves them",
        "prefill 1-8: without graphs: asked for",
    ]


def test_defaults_are_said_for_the_device() -> None:
    assert capture_lines("cpu", OPTIONS) == [
        "decode: none, on `cpu` nothing is captured: there are no CUDA graphs",
        "prefill: none, on `cpu` nothing is captured: there are no CUDA graphs",
    ]
    decode, prefill = capture_lines("cuda:1", OPTIONS)
    assert decode == (
        "decode: full, the default on cuda in mode `piecewise`; 35 sizes serve up to 256 tokens, "
        "and none serves 257-512"
    )
    assert prefill.startswith("prefill: piecewise, the default on cuda in mode `piecewise`; ")
    assert prefill.endswith("sizes serve up to 512 tokens")


@pytest.mark.parametrize(
    "flags",
    [
        CaptureFlags(),
        CaptureFlags(cudagraph_mode="none"),
        CaptureFlags(disable_cuda_graph=True),
        CaptureFlags(cuda_graph_backend_decode="disabled", cuda_graph_backend_prefill="disabled"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_to_capture_nothing_is_fine(flags: CaptureFlags, device: str) -> None:
    check_capture(flags, device, OPTIONS)


REFUSED = [
    (CaptureFlags(cudagraph_mode="FULL"), "cpu", "decode cannot be captured `full` on `cpu`: there are no CUDA graphs"),
    (CaptureFlags(cudagraph_mode="FULL"), "cuda", "`generate` runs every step as it is, so decode cannot be captured"),
    (CaptureFlags(cudagraph_mode="FUL"), "cpu", "`cudagraph_mode` is `FUL`"),
    (CaptureFlags(cudagraph_capture_sizes="1,2"), "cpu", "`decode_sizes` has no meaning here: decode is not captured"),
    (CaptureFlags(cuda_graph_backend_prefill="full"), "cpu", "prefill cannot be captured `full` on `cpu`"),
    (CaptureFlags(cudagraph_mode="FULL", disable_cuda_graph=True), "cpu", "contradict each other about `decode`"),
]


@pytest.mark.parametrize(("flags", "device", "message"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_generate_cannot_honour_is_refused(flags: CaptureFlags, device: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_capture(flags, device, OPTIONS)
    assert message in caught.value.message
    assert caught.value.hint
