"""Name the common work of one reading, and what a stack hands back once it runs."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from measure import Elapsed
from toy_llama import ToyLlama, ToyShape, fill_weights

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Work:
    """Hold the model's shape, the number of tokens of the example, and the folder that outlives the process."""

    shape: ToyShape
    num_tokens: int
    folder: pathlib.Path
    is_warm: bool

    def inputs(self, num_tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the same token ids and positions in every process, never marked by another stack."""
        count = self.num_tokens if num_tokens is None else num_tokens
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, self.shape.vocabulary, (count,), generator=generator), torch.arange(count)

    def model(self) -> ToyLlama:
        """Build the toy with its seeded weights."""
        model = ToyLlama(self.shape)
        fill_weights(model)
        return model.eval()


@dataclasses.dataclass(frozen=True)
class Started:
    """Hold a stack that has given its first result.

    `first_result` runs from asking the stack to start (or from the first call, where it starts then) to the first
    result. `bound` ends where the stack has something to call, for a stack that tells the two apart.
    """

    call: Call
    first_result: Elapsed
    bound: Elapsed | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def first_result(call: Call, work: Work, **facts: Any) -> Started:
    """Make the first call of a stack that compiles when it is first called."""
    inputs = work.inputs()
    start = Elapsed.now()
    call(*inputs)
    return Started(call, start.until_now(), facts=facts)
