"""What an engine needs to know of a model, and how a step of it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from piecework.engine.batch import Batch
from piecework.engine.generate import StepFunction
from piecework.models.folder import KvSite
from piecework.ops import AttentionBackend, ReferenceAttention, step_context


@dataclass(frozen=True)
class Served:
    """A model whose weights are in: its eager step, what each layer's cache holds, and its limits.

    Where `keeps_rows` is false a step computes the logits of every token and picks those that were asked for.
    `max_positions` is 0 where the model does not say, `tokenizer` None where answers are token ids alone. `config` is
    the folder's configuration.
    """

    step: StepFunction
    sites: tuple[KvSite, ...]
    dtype: torch.dtype
    device: str = "cpu"
    keeps_rows: bool = True
    end_of_sequence: frozenset[int] = frozenset()
    max_positions: int = 0
    vocabulary_size: int = 0
    tokenizer: Tokenizer | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    weights_bytes: int = 0
    backend: AttentionBackend = field(default_factory=ReferenceAttention)


class Runner(Protocol):
    """What runs a batch: the best of several tiers, or what watches them."""

    def run(self, batch: Batch) -> Tensor:
        """Return the logits of the batch's rows.

        Tensors:
            ->  [B, V]  model  valid until the next step
        """
        ...


class Others(Protocol):
    """The other ranks that run each step along, where several share the model."""

    beat_s: float

    def beat(self) -> None:
        """Tell them that this one is there; called at every step, and every `beat_s` seconds while there are none."""
        ...

    def close(self, failure: Exception | None = None) -> None:
        """Say goodbye to them, or that this one has failed."""
        ...


def call_step(step: StepFunction, batch: Batch) -> Tensor:
    """Call a step function with a batch, and return the logits of the rows that are chosen from.

    Tensors:
        ->  [B, V]  model  one for each sequence whose next token is chosen
    """
    with torch.inference_mode(), step_context(batch.step):
        logits = step(batch.input_ids, batch.position_ids, batch.rows)
    return logits.reshape(-1, logits.shape[-1])[: len(batch.sampled)]
