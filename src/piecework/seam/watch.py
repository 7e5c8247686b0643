"""Hold operators to their contract while a model runs eagerly, on the inputs that the run itself gives them.

A trace checks what it can without a step. Here bodies run where they belong: inside the engine's step, with its cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.errors import ContractError, PieceworkError
from piecework.seam.contracts import faults_of_registration
from piecework.seam.kinds import storage_of
from piecework.seam.promises import Before, call_body, check_results, expected_of, is_custom_name, refuse_shared

_MOST_ELEMENTS = 1 << 24


class ContractWatch(TorchDispatchMode):
    """Check each operator that is not torch's own once at each of the shapes it is called with.

    `faults` says what was found by operator, `shapes` how many different calls each was tried with. A body runs several
    times more than the model calls it: on copies of its arguments, and for `torch.library.opcheck`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[str, list[PieceworkError]] = {}
        self.shapes: dict[str, set[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check a call where it is one to check, then make it."""
        given = dict(kwargs or {})
        if is_custom_name(func.namespace):
            self._visit(func, tuple(args), given)
        return func(*args, **given)

    def _visit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = f"{func.namespace}::{func._opname}"
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        seen = self.shapes.setdefault(name, set())
        if shapes in seen or sum(t.numel() for t in tensors) > _MOST_ELEMENTS:
            return
        if not seen:
            found = [ContractError(f"operator `{name}` {what}") for _, what in faults_of_registration(name)]
            self.faults.setdefault(name, []).extend(found)
        seen.add(shapes)
        if any("has no fake" in fault.message for fault in self.faults[name]):
            return
        try:
            # Tensors of an inference hold no versions, which torch's own check reads: copies are made outside it.
            with torch.inference_mode(False), torch.no_grad():
                _check_call(name, func, args, kwargs)
        except ContractError as error:
            known = self.faults.setdefault(name, [])
            if error.message not in [one.message for one in known]:
                known.append(error)


def _check_call(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from torch._subclasses import FakeTensorMode

    own, own_kwargs = _copies((args, kwargs))
    names = [argument.name for argument in func._schema.arguments]
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    pairs = [*zip(names, own, strict=False), *own_kwargs.items()]
    arguments = [
        (n, leaf) for n, value in pairs for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)
    ]
    before = Before(arguments)
    result = call_body(name, func, own, own_kwargs)
    before.refuse_writes(name, {storage_of(tensor) for argument, tensor in arguments if argument in written})
    with FakeTensorMode() as mode:
        fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (own, own_kwargs))
        try:
            fakes = func(*fake_args, **fake_kwargs)
        except Exception as error:
            raise ContractError(
                f"the fake of operator `{name}` fails: {error}",
                hint="`register_fake` must take what the body takes, and touch no values",
                facts={"operator": name},
            ) from error
    refuse_shared(name, result, arguments, written)
    check_results(name, result, expected_of(fakes, int))
    _torch_check(name, func, *_copies((args, kwargs)))


def _copies(values: Any) -> Any:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)

    return pytree.tree_map_only(torch.Tensor, copy, values)


def _torch_check(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        torch.library.opcheck(func, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    except Exception as error:
        said = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), type(error).__name__)
        raise ContractError(
            f"operator `{name}` fails `torch.library.opcheck`: {said.strip()}",
            hint="its schema and its fake must describe what its body does",
            facts={"operator": name, "report": str(error)},
        ) from error
