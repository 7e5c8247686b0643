"""A bound program: what runs on every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from piecework.runtime.misfit import refuse_call
from piecework.runtime.regions import Bound


class Program:
    """A compiled model, ready to be called like the module it was made from.

    `key` names its record in the store, `source` is the generated Python that runs, `weights` are the
    tensors it reads, by qualified name. Results are fresh tensors and belong to the caller.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        *,
        key: str,
        source: str,
        weights: Mapping[str, torch.Tensor],
        elsewhere: Program | None = None,
        bound: Bound | None = None,
    ) -> None:
        self._call = self._takes = call
        self.key = key
        self.source = source
        self.weights: dict[str, torch.Tensor] = {**(elsewhere.weights if elsewhere is not None else {}), **weights}
        self.sides: tuple[Program, ...] = (self, *(elsewhere.sides if elsewhere is not None else ()))
        self.variants: tuple[Program, ...] = (self,)
        self.bound = bound
        self.model: torch.nn.Module | None = None
        self.evaluates_guards = False
        self.whole_forward: Callable[[int, str], Program] | None = None  # compiles it anew for one size, in a mode
        self._rebind: Callable[[Mapping[str, torch.Tensor]], Program] | None = None
        self._findings: Callable[[Any], tuple[str, ...]] = lambda model: ()
        self._around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; raise `InputError` or `ShapeOutOfRange` where the arguments do not fit."""
        try:
            return self._call(*args, **kwargs)
        except TypeError:
            refuse_call(self._takes, args, kwargs)
            raise

    def attach(
        self,
        *,
        rebind: Callable[[Mapping[str, torch.Tensor]], Program],
        findings: Callable[[Any], tuple[str, ...]],
        release: Callable[[], None],
        model: torch.nn.Module | None = None,
    ) -> None:
        """Give the program what `refresh` and `check` call, and what lets go of its record when it is gone.

        `model` is the object that it was compiled from, where there is one.

        Tensors:
            rebind  [...]  any  takes weights by name, and returns the program that reads them
        """
        self._rebind, self._findings, self.model = rebind, findings, model
        weakref.finalize(self, release)

    def wrap(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let every call go through what `around` makes of it, also after a refresh."""
        before = self._around
        self._around = lambda call: around(before(call))
        self._call = around(self._call)

    def check(self, model: Any = None) -> tuple[str, ...]:
        """Return what does not hold any more of what the program was traced and bound with; nothing if all holds.

        Compared are the Python values that forward read, the code it ran, the files it stands in, and whether
        each weight of the model is still the tensor that the program reads. `model` is the model as it is now;
        a program that was compiled from a model object knows it already.
        """
        if len(self.variants) > 1:
            return tuple(dict.fromkeys(finding for one in self.variants for finding in one.check(model)))
        return self._findings(model)

    def refresh(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Read other tensors from now on: those of the model as it is now, or `weights` by qualified name.

        Weights that a mapping leaves out stay as they are. What was captured of the program reads the tensors of
        before until its own `refresh`, and says so. Raises BindError where one does not fit.

        Tensors:
            weights  [...]  any  as the program was compiled for; read at their addresses from now on
        """
        if len(self.variants) > 1:
            for variant in self.variants:
                variant.refresh(weights)
                self.weights.update(variant.weights)
            return
        if self._rebind is None:
            return
        fresh = self._rebind({**self.weights, **weights} if weights else {})
        self._call, self._takes, self.source = self._around(fresh._call), fresh._takes, fresh.source
        self.weights.update(fresh.weights)  # the same dictionary: whoever watches its entries sees them change
        self.bound = fresh.bound
        self.sides = (self, *fresh.sides[1:])

    def __repr__(self) -> str:
        return f"Program(key={self.key!r}, weights={len(self.weights)})"
