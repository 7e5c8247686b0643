"""Decode sizes up to a bound are captured of the whole forward, compiled for that very size."""

from __future__ import annotations

import pytest
import torch

import piecework as pw
from capture_toys import DYNAMIC, compiled, inputs, toy
from piecework.errors import OptionError
from piecework.events import ArtifactCompiled, Recorder, SplitDone


@pytest.mark.parametrize("is_traced", [True, False])
def test_the_whole_forward_is_compiled_for_small_decode_sizes(is_traced: bool) -> None:
    model, made = toy(), []

    def whole(size: int, mode: str) -> pw.Program:
        made.append((size, mode))
        return compiled(model, mode="trace_once", max_num_batched_tokens=size, ranges=((1, size),))

    options = pw.CaptureOptions(decode="full", decode_sizes=(1, 3, 6), prefill="none", whole_forward_max=3)
    given = {"options": options, "device": "dry", "whole_forward": whole}
    if is_traced:
        replayed = pw.capture(compiled(model), **given)
    else:
        replayed = pw.capture(model, inputs(4), dynamic=DYNAMIC, max_num_batched_tokens=64, **given)
    assert made == [(3, "max-autotune-no-cudagraphs"), (1, "max-autotune-no-cudagraphs")]
    for count in (1, 2, 3, 4, 5, 6):
        torch.testing.assert_close(replayed(*inputs(count)), model(*inputs(count)))
    assert replayed.counts == {("decode", "full"): 6}


def test_a_program_compiles_its_own_whole_forward_and_keeps_it() -> None:
    model, store, seen = toy(), pw.MemoryStore(), Recorder()
    settings = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, ranges=((1, 64),))
    options = pw.CaptureOptions(decode="full", decode_sizes=(1, 3, 6), prefill="none", whole_forward_max=3)

    def replayed(observer: Recorder) -> pw.CapturedProgram:
        program = pw.compile(model, inputs(4), dynamic=DYNAMIC, options=settings, store=store, observer=observer)
        return pw.capture(program, options=options, device="dry")

    first = replayed(seen)
    # One region each, beside the pieces of the general program, which nothing found in the place of the other.
    assert [split.regions for split in seen.of(SplitDone)] == [7, 1, 1]
    for count in (1, 2, 3, 4, 5, 6):
        torch.testing.assert_close(first(*inputs(count)), model(*inputs(count)))
    assert first.counts == {("decode", "full"): 6}
    warm = Recorder()
    second = replayed(warm)
    assert (warm.of(SplitDone), warm.of(ArtifactCompiled)) == ([], [])
    torch.testing.assert_close(second(*inputs(2)), model(*inputs(2)))


def test_what_cannot_compile_its_whole_forward_says_so() -> None:
    model, store = toy(), pw.MemoryStore()
    settings = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64)
    program = pw.compile(model, inputs(4), dynamic=DYNAMIC, options=settings, store=store)
    options = pw.CaptureOptions(decode="full", prefill="none", whole_forward_max=2, whole_forward_mode="default")
    with pytest.raises(OptionError, match="a mode of Inductor's, and the program was compiled by `eager`"):
        pw.capture(program, options=options, device="dry")
    loaded = pw.load(store, key=program.key, weights=program.weights)
    with pytest.raises(OptionError, match="nothing was given that compiles it"):
        pw.capture(loaded, options=options, device="dry")
