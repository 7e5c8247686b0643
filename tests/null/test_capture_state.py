"""What a captured model writes beside its results: as it was after capturing, right after each step, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import compile_case, rows
from piecework.errors import CaptureError, InputError


class Counts(nn.Module):
    """Count steps in a buffer that is not saved, and add the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, 4), persistent=False)
        self.register_buffer("table", torch.arange(16.0).view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.view(-1)[:8].add_(1)
        self.seen[1:].mul_(2)
        return x * 2 + self.seen[0] + self.table[1]


class WritesArgument(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[1:].add_(1)
        return x * 2 + cache[1]


class WritesSum(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.sum(0))
        return x * 2


class WritesCount(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.shape[0])
        return x * 2


class ReturnsSum(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sum(0)


class DividesByCount(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[0]


class DividesColumnsByCount(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


both = pytest.mark.parametrize("compiles", [True, False], ids=["compiled", "as it is"])


def captured(
    model: nn.Module, compiles: bool, *more: Tensor, sizes: tuple[int, ...] = (8,), dim: int = 0, **given: Any
) -> Any:
    options = pw.CaptureOptions(decode="none", prefill="full" if compiles else "breakable", prefill_sizes=sizes)
    example, dynamic = (torch.rand(5, 4) if dim == 0 else torch.rand(4, 5), *more), {"x": {dim: "tokens"}}
    if compiles:
        line = {"max_num_batched_tokens": 8, "ranges": ((1, 8),)}
        program = compile_case(model, example, dynamic=dynamic, options=line)
        return pw.capture(program, device="dry", options=options, **given)
    return pw.capture(model, example, dynamic=dynamic, max_num_batched_tokens=8, device="dry", options=options, **given)


@both
def test_capturing_leaves_what_forward_writes_as_it_was_and_steps_go_on_from_there(compiles: bool) -> None:
    model, twin = Counts(), Counts()
    model.seen.fill_(3.0)
    program = captured(model, compiles, sizes=(4, 8))
    assert torch.equal(model.seen, torch.full((4, 4), 3.0))
    twin.seen.fill_(3.0)
    for size in (3, 8, 4):
        x = rows(size)[0]
        assert torch.equal(program(x), twin(x))
        assert torch.equal(model.seen, twin.seen)


@both
def test_an_input_that_is_written_keeps_its_address_and_what_it_held(compiles: bool) -> None:
    with pytest.raises(CaptureError, match=r"(?s)the model writes to its input `cache`.*fixed={'cache': tensor}"):
        captured(WritesArgument(), compiles, torch.zeros(4, 4))
    cache, own = torch.ones(4, 4), torch.ones(4, 4)
    program = captured(WritesArgument(), compiles, cache, fixed={"cache": cache})
    assert torch.equal(cache, own)
    for size in (3, 8):
        x = rows(size)[0]
        assert torch.equal(program(x, cache), WritesArgument()(x, own))
        assert torch.equal(cache, own)


@both
def test_an_argument_over_memory_that_is_written_is_refused(compiles: bool) -> None:
    model, twin = Counts(), Counts()
    program, x = captured(model, compiles), rows(3)[0]
    assert torch.equal(program(x), twin(x))
    with pytest.raises(InputError, match="argument `x` shares memory with .*`seen`, and the model writes to"):
        program(model.seen[:2])
    assert torch.equal(program(model.table[:2]), twin(twin.table[:2]))
    assert torch.equal(model.seen, twin.seen)


REFUSED = [
    (WritesSum, "what the model writes in place: it follows the last one's input"),
    (WritesCount, "what the model writes in place: it follows how many there are"),
    (ReturnsSum, "real rows: the first ones of .* follow the last one's input"),
    (DividesByCount, "real rows: the first ones of .* follow how many there are"),
]


@both
@pytest.mark.parametrize(("model", "words"), REFUSED, ids=[model.__name__ for model, _ in REFUSED])
def test_padding_that_would_be_seen_is_refused(model: type[nn.Module], words: str, compiles: bool) -> None:
    with pytest.raises(CaptureError, match=f"padding would change {words}"):
        captured(model(), compiles)


@both
def test_padding_of_another_dimension_is_looked_at_too(compiles: bool) -> None:
    with pytest.raises(CaptureError, match="padding would change real rows: .* follow how many there are"):
        captured(DividesColumnsByCount(), compiles, dim=1)
    program, x = captured(DividesByCount(), compiles, dim=1), torch.rand(4, 3)
    assert torch.equal(program(x), x / 4)


@both
def test_what_mixes_rows_is_served_where_every_size_is_captured(compiles: bool) -> None:
    model, twin = WritesSum(), WritesSum()
    program = captured(model, compiles, sizes=tuple(range(1, 9)))
    for size in (3, 8, 1):
        x = rows(size)[0]
        assert torch.equal(program(x), twin(x))
        assert torch.equal(model.seen, twin.seen)
