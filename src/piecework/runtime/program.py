"""A bound program: what runs on every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class Program:
    """A compiled model, ready to be called like the module it was made from.

    `key` names its record in the store, `source` is the generated Python that runs, `weights` are the
    tensors it reads, by qualified name. Results are fresh tensors and belong to the caller.
    """

    def __init__(self, call: Callable[..., Any], *, key: str, source: str, weights: Mapping[str, torch.Tensor]) -> None:
        self._call = call
        self.key = key
        self.source = source
        self.weights = dict(weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; raise `InputError` or `ShapeOutOfRange` where the arguments do not fit."""
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Program(key={self.key!r}, weights={len(self.weights)})"
