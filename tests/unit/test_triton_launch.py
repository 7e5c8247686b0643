"""A Triton kernel's binary is looked for once for calls that are alike, and never used for one that it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecework.ops.triton_launch import Grid, Kernel


class FakeKernel:
    """What Triton's `jit` gives: `kernel[grid](*arguments)` looks for a binary, launches it and returns it."""

    def __init__(self) -> None:
        self.searched: list[tuple[Grid, tuple[Any, ...]]] = []

    def __getitem__(self, grid: Grid) -> Any:
        def search(*arguments: Any) -> str:
            self.searched.append((grid, arguments))
            return f"binary {len(self.searched)}"

        return search


class FakeLauncher:
    def __init__(self) -> None:
        self.launched: list[tuple[str, Grid, tuple[Any, ...]]] = []

    def __call__(self, binary: str) -> Any:
        def call(grid: Grid, arguments: Sequence[Any]) -> None:
            self.launched.append((binary, grid, tuple(arguments)))

        return call


def aligned(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    whole = torch.zeros(64, dtype=dtype)
    return whole[(-whole.data_ptr() % 16) // whole.element_size() :]


def test_the_second_call_launches_what_the_first_one_found() -> None:
    fake, quick = FakeKernel(), FakeLauncher()
    kernel, one, two = Kernel(fake), aligned(), aligned()
    launch = kernel.bind((3, 2), (0.5,), (64,), (True,), quick)
    launch(one, one)
    launch(two, one)
    assert fake.searched == [((3, 2, 1), (one, one, 0.5, 64, True))]
    assert quick.launched == [("binary 1", (3, 2, 1), (two.data_ptr(), one.data_ptr(), 0.5, 64, True))]


def test_the_next_step_knows_the_binary_whatever_its_grid_and_free_numbers() -> None:
    fake, quick = FakeKernel(), FakeLauncher()
    kernel, one = Kernel(fake), aligned()
    kernel.bind((3,), (1,), (64,), (), quick)(one)
    kernel.bind((7,), (2,), (64,), (), quick)(one)
    assert len(fake.searched) == 1
    assert quick.launched == [("binary 1", (7, 1, 1), (one.data_ptr(), 2, 64))]


def test_another_stride_constant_or_dtype_is_looked_for() -> None:
    fake, quick = FakeKernel(), FakeLauncher()
    kernel, one = Kernel(fake), aligned()
    for fixed, constants, tensor in (
        ((64,), (16,), one),
        ((65,), (16,), one),
        ((64,), (32,), one),
        ((64,), (16,), aligned(torch.bfloat16)),
    ):
        kernel.bind((1,), (), fixed, constants, quick)(tensor)
    assert len(fake.searched) == 4 and not quick.launched


def test_memory_that_is_not_aligned_never_reaches_a_binary_for_memory_that_is() -> None:
    fake, quick = FakeKernel(), FakeLauncher()
    kernel, one = Kernel(fake), aligned()
    launch = kernel.bind((1,), (), (), (), quick)
    launch(one)
    launch(one[1:])
    launch(one)
    assert [arguments[0].data_ptr() - one.data_ptr() for _, arguments in fake.searched] == [0, 4]
    assert len(quick.launched) == 1


def test_where_nothing_quicker_launches_a_binary_triton_does() -> None:
    launched: list[Any] = []

    class Binary:
        def __getitem__(self, grid: Grid) -> Any:
            return lambda *arguments: launched.append((grid, arguments))

    class Finding(FakeKernel):
        def __getitem__(self, grid: Grid) -> Any:
            return lambda *arguments: Binary()

    one = aligned()
    launch = Kernel(Finding()).bind((2,), (), (), (), lambda binary: None)
    launch(one)
    launch(one)
    assert launched == [((2, 1, 1), (one.data_ptr(),))]
