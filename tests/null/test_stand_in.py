"""A graph compiled whole is tried with stand-ins of its opaque operators, and what is wrong around them is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partitions import compiled, inputs, kept, layers
from piecework.compilers.eager import EagerCompiler
from piecework.events import FallBack, Recorder, VerificationFailed, Verified
from piecework.seam.stand_in import stand_in
from piecework.values.artifact import TEXT, Artifact


class Wrong(EagerCompiler):
    """Writes the text anew, with one word exchanged for another."""

    name = "wrong"

    def __init__(self, word: str = "", other: str = "") -> None:
        self._word, self._other = word, other

    def compile(self, text: str, box: Any) -> Artifact:
        assert self._word in text
        place = text.rindex(self._word) if self._word else len(text)
        return Artifact(TEXT, text[:place] + self._other + text[place + len(self._word) :] + "\n")


@pytest.mark.parametrize("partition", ["inductor", "none"])
def test_what_is_right_around_opaque_calls_is_verified_and_runs_no_body(partition: str) -> None:
    watch = Recorder()
    kept.clear()
    program = compiled(layers(), partition, observer=watch, options={"compiler": Wrong()})
    assert [(e.outcome, e.reason) for e in watch.of(Verified)] == [("held", "")]
    assert kept == []
    torch.testing.assert_close(program(*inputs(3)), layers()(*inputs(3)))
    assert len(kept) == 4  # two layers, in the program and in the model


@pytest.mark.parametrize(("word", "other"), [("torch.sigmoid", "torch.tanh"), ("torch.relu", "torch.sin")])
def test_what_is_wrong_before_or_behind_an_opaque_call_is_not_served(word: str, other: str) -> None:
    """The last sigmoid makes a query, which only attention reads: its stand-in hands the error on."""
    watch, model = Recorder(), layers()
    program = compiled(model, "inductor", observer=watch, options={"compiler": Wrong(word, other)})
    assert len(watch.of(VerificationFailed)) == len(watch.of(FallBack)) == 1
    torch.testing.assert_close(program(*inputs(5)), model(*inputs(5)))


def test_a_stand_in_keeps_shapes_rows_and_what_is_written() -> None:
    two = stand_in(torch.ops.partitions.two)
    x = torch.randn(4, 8)
    one, sums = two(x)
    assert (one.shape, sums.shape) == (x.shape, (4,))
    changed = x.clone()
    changed[2] += 1
    assert [row for row in range(4) if not torch.equal(two(changed)[0][row], one[row])] == [2]
    cache = torch.zeros(9, 8)
    assert stand_in(torch.ops.partitions.write)(x, torch.arange(4), cache).shape == (0,)
    assert bool(cache.any())
