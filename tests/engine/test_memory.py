"""How many pages there is memory for: what a step is said to take covers what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.counting import SITE
from engine.counting import served as counting
from piecework.api.serving import open_engine
from piecework.engine.memory import ROUNDED_BYTES, plan_pages, profile_step, step_bytes
from piecework.engine.options import EngineOptions
from piecework.errors import CompileForbidden, EngineError
from piecework.models.folder import KvSite
from piecework.seam.dry import DryDevice
from tiny_models import tiny_folder

OPTIONS = EngineOptions(max_num_sequences=8, max_num_batched_tokens=256, num_pages=8, enforce_eager=True)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "mixtral", "gpt_oss"])
def test_what_a_step_is_said_to_take_covers_what_the_largest_takes(architecture: str, tmp_path: Path) -> None:
    """Wide enough that tensors, and not their number, take the memory."""
    folder = tiny_folder(architecture, tmp_path / "model", vocab_size=2048)
    served = open_engine(folder, engine=OPTIONS).served
    peak = profile_step(served, OPTIONS, DryDevice())
    said = step_bytes(served, OPTIONS.max_num_batched_tokens, OPTIONS.max_num_sequences)
    assert 0 < peak <= said, (peak, said)


def test_a_step_that_compiles_is_told_before_anything_is_served() -> None:
    def step(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)  # for each size anew
        return compiled(torch.zeros(1, rows.shape[0], 96))

    with pytest.raises(CompileForbidden):
        profile_step(replace(counting(), step=step), OPTIONS, Takes(0))


class Takes:
    """A device on which each block takes so many bytes."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def measure_peak(self) -> AbstractContextManager[Callable[[], int]]:
        """Say what a block took."""

        @contextmanager
        def measure() -> Iterator[Callable[[], int]]:
            yield lambda: self.size_bytes

        return measure()


def test_what_the_profile_run_took_is_not_given_to_pages_and_small_differences_change_nothing() -> None:
    served = replace(counting(), sites=(KvSite(SITE, 64, 128),))
    options = replace(OPTIONS, num_pages=0, memory_fraction=0.5, max_length=1 << 20)

    def pages(took: int) -> int:
        profiled = profile_step(served, options, Takes(took))
        return plan_pages(served, options, total_bytes=8 << 30, profiled_bytes=profiled)

    found = {
        took: pages(took)
        for took in (0, ROUNDED_BYTES + 1, ROUNDED_BYTES + 999, 2 * ROUNDED_BYTES, 2 * ROUNDED_BYTES + 1)
    }
    assert found[0] > found[ROUNDED_BYTES + 1] > found[2 * ROUNDED_BYTES + 1]
    assert found[ROUNDED_BYTES + 1] == found[ROUNDED_BYTES + 999] == found[2 * ROUNDED_BYTES]
    with pytest.raises(EngineError, match="there is no memory for pages"):
        plan_pages(served, options, total_bytes=8 << 30, profiled_bytes=8 << 30)
