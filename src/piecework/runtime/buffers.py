"""Memory at fixed addresses that graphs read: a step's inputs, and its metadata where bodies are inside a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piecework.errors import CaptureError, InputError
from piecework.ops.step import Step
from piecework.runtime.explain import Leaf
from piecework.values.overlap import is_overlapping
from piecework.values.signature import TensorSpec

Copy = Callable[[list[Tensor], list[Tensor]], None]


@dataclass(frozen=True)
class InputPlan:
    """One tensor input: its path and its name in the program, its spec, and the dimensions that vary, with symbols."""

    path: str
    name: str
    spec: TensorSpec
    dims: tuple[tuple[int, str], ...]
    is_fixed: bool

    def shape_at(self, size: int) -> tuple[int, ...]:
        """Return the shape at a padded size, which every symbol takes."""
        return tuple(size if isinstance(part, str) else part for part in self.spec.shape)


def plan_inputs(leaves: Sequence[Leaf], symbols: Sequence[str]) -> tuple[InputPlan, ...]:
    """Return what has to be copied before a replay; an input that the model writes keeps the caller's own address."""
    found = []
    for leaf in leaves:
        if not isinstance(leaf.spec, TensorSpec) or leaf.same_as:
            continue
        dims = tuple((d, part) for d, part in enumerate(leaf.spec.shape) if isinstance(part, str))
        strange = [part for _, part in dims if part not in symbols]
        if strange:
            raise CaptureError(
                f"input `{leaf.path}` has a dimension `{strange[0]}`, which padding cannot follow",
                hint="declare the dimension by a name of its own",
            )
        if leaf.spec.stride is not None and dims:
            raise CaptureError(
                f"input `{leaf.path}` is not contiguous, and its size varies",
                hint="call .contiguous() on it, in the example too",
            )
        found.append(InputPlan(leaf.path, leaf.name, leaf.spec, dims, leaf.is_written))
    return tuple(found)


class StaticInputs:
    """The inputs of every captured size, at addresses that stay.

    An input of floats whose first dimension alone varies has one buffer for all sizes, of which a size reads the first
    rows; any other has a buffer a size. Rows beyond a step's own keep what an earlier step left there: numbers that are
    valid and that no real row depends on. Whole numbers may be indices into what is as long as the size, which those
    that a larger one left would exceed.
    """

    def __init__(self, plans: Sequence[InputPlan], largest: int, device: torch.device, copy: Copy) -> None:
        self.plans = tuple(plans)
        self._copied = tuple(index for index, plan in enumerate(self.plans) if not plan.is_fixed)
        self._device = device
        self._copy = copy
        self._whole: dict[str, Tensor] = {}
        self._of_size: dict[tuple[str, int], Tensor] = {}
        self._targets: dict[tuple[int, int], list[Tensor]] = {}
        self._largest = largest
        self._written: dict[int, tuple[str, Tensor]] = {}

    def keep_apart(self, written: Mapping[int, tuple[str, Tensor]]) -> None:
        """Take no input that shares memory with what the graphs write, by address: its copy would not see the write.

        Tensors:
            written  [...]  any  beside what holds each, for the message
        """
        self._written |= written

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._whole.values(), *self._of_size.values()))

    def _allocate(self, plan: InputPlan, size: int) -> Tensor:
        shape, dtype = plan.shape_at(size), getattr(torch, plan.spec.dtype)
        if plan.spec.stride is not None:
            return torch.empty_strided(shape, plan.spec.stride, dtype=dtype, device=self._device).zero_()  # type: ignore[arg-type]
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def at(self, size: int) -> dict[str, Tensor]:
        """Return the buffers of a size by the inputs' names; those at the caller's addresses are left out.

        Tensors:
            ->  [T, ...]  any  one an input; fixed address; valid until `release`
        """
        return {plan.name: self._buffer(plan, size) for plan in self.plans if not plan.is_fixed}

    def _buffer(self, plan: InputPlan, size: int) -> Tensor:
        if _is_shared(plan):
            whole = self._whole.get(plan.name)
            if whole is None:
                whole = self._whole[plan.name] = self._allocate(plan, self._largest)
            return whole[:size] if plan.dims else whole
        key = (plan.name, size)
        if key not in self._of_size:
            self._of_size[key] = self._allocate(plan, size)
        return self._of_size[key]

    def release(self) -> None:
        """Give the buffers back; they are made anew when they are needed again, at other addresses."""
        self._whole.clear()
        self._of_size.clear()
        self._targets.clear()
        self._written.clear()

    def load(self, size: int, count: int, given: Sequence[Tensor]) -> None:
        """Copy a step's inputs to the first rows of the buffers of a size.

        Tensors:
            given  [N, ...]  any  in the plans' order, N of the T rows
        """
        sources = [given[index] for index in self._copied]
        if self._written and not self._written.keys().isdisjoint([t.untyped_storage().data_ptr() for t in sources]):
            self._refuse_shared(sources)
        targets = self._targets.get((size, count))
        if targets is None:
            targets = self._slice(size, count, sources)
        elif any(map(_differ, targets, sources)):
            targets = self._slice(size, count, sources)
        self._copy(targets, sources)

    def _refuse_shared(self, sources: Sequence[Tensor]) -> None:
        for index, source in zip(self._copied, sources, strict=True):
            name, written = self._written.get(source.untyped_storage().data_ptr(), ("", source))
            if name and is_overlapping(source, written):
                raise InputError(
                    f"argument `{self.plans[index].path}` shares memory with {name}, and the model writes to it",
                    hint="pass a copy",
                )

    def _slice(self, size: int, count: int, sources: Sequence[Tensor]) -> list[Tensor]:
        targets = []
        for index, source in zip(self._copied, sources, strict=True):
            target = self._buffer(self.plans[index], size)
            for dim, _ in self.plans[index].dims:
                if target.shape[dim] != source.shape[dim]:
                    target = target.narrow(dim, 0, source.shape[dim])
            targets.append(target)
        self._targets[size, count] = targets
        return targets

    def poison(self, size: int) -> None:
        """Fill what can hold a NaN with it, and the rest with zeros: nothing of an earlier step is left to read."""
        for tensor in self.at(size).values():
            tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()


def _differ(target: Tensor, source: Tensor) -> bool:
    return target.shape != source.shape


def _is_shared(plan: InputPlan) -> bool:
    follows_rows = len(plan.dims) == 1 and plan.dims[0][0] == 0
    return not plan.dims or (follows_rows and getattr(torch, plan.spec.dtype).is_floating_point)


class StaticStep:
    """A step's metadata at fixed addresses, for graphs that hold opaque bodies.

    Rows beyond the caller's are padding: slots of -1, sequences without tokens.
    """

    def __init__(self, step: Step) -> None:
        own = {name: getattr(step, name).clone() for name in _STEP_TENSORS}
        self.step = replace(step, **own, is_static=True)
        self._tensors = [own[name] for name in _STEP_TENSORS]
        self._sites = step.sites

    def load(self, current: Step, copy: Copy) -> None:
        """Copy a step in; raise CaptureError where its sites hold other caches than at capture."""
        if current is self.step:
            return
        if current.sites is not self._sites:
            moved = [name for name, state in self._sites.items() if current.sites.get(name) is not state]
            if moved:
                raise CaptureError(
                    f"the step's sites {_listed(moved)} hold another cache than the graph was captured with",
                    hint="keep the caches that the capture saw, or call recapture()",
                    facts={"moved": moved},
                )
        given = [getattr(current, name) for name in _STEP_TENSORS]
        if all(a.shape == b.shape for a, b in zip(self._tensors, given, strict=True)):
            copy(self._tensors, given)
            return
        self._load_part(given, copy)

    def _load_part(self, given: Sequence[Tensor], copy: Copy) -> None:
        if any(n > m for a, b in zip(given, self._tensors, strict=True) for n, m in zip(a.shape, b.shape, strict=True)):
            shapes = [list(t.shape) for t in given], [list(t.shape) for t in self._tensors]
            raise CaptureError(
                f"a step of shapes `{shapes[0]}` does not fit the captured one, `{shapes[1]}`",
                hint="capture with the longest page table and the most sequences that will come",
            )
        slots, starts, lengths, table = self._tensors
        rows, edges, sequences = given[0].shape[0], given[1].shape[0], given[2].shape[0]
        if rows < slots.shape[0]:
            slots[rows:].fill_(-1)
        if edges < starts.shape[0]:
            starts[edges:].copy_(given[1][-1:].expand(starts.shape[0] - edges))
        if sequences < lengths.shape[0]:
            lengths[sequences:].zero_()
        copy([slots[:rows], starts[:edges], lengths[:sequences]], list(given[:3]))
        table[: given[3].shape[0], : given[3].shape[1]].copy_(given[3])


_STEP_TENSORS = ("slots", "query_starts", "sequence_lengths", "page_table")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:8]) + (" …" if len(names) > 8 else "")
