"""Run code on tensors without memory at given sizes, and note what each operator reads and writes.

What is noted are the operators that eager would launch, as the dispatcher sees them: what only views or allocates is
none, a cast to the same dtype is none, and a composite one is those that it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from piecework.seam.dispatch import Watching
from piecework.seam.kinds import storage_of

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_GATHERS = {"embedding", "index_select", "index", "gather", "take", "take_along_dim"}  # read rows of their first tensor
_SCATTERS = {"index_copy_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_"}  # write rows
_OVERWRITES = {"copy_", "fill_", "zero_"}  # do not read what they write
_FUSIBLE = {
    "_to_copy", "clone", "cat", "stack", "embedding", "index_select", "index", "gather", "_softmax", "_log_softmax",
    "native_layer_norm", "native_group_norm", "copy_", "arange", "full", "zeros", "ones", "full_like", "zeros_like",
    "ones_like", "scalar_tensor", "constant_pad_nd", "repeat", "flip", "roll", "cumsum", "new_zeros", "new_full",
    "sum", "mean", "prod", "var", "var_mean", "max", "min", "any", "all", "logsumexp", "triu", "tril",
}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """The part of a tensor that one operator touches: which memory and how large, which part, and its distinct bytes.

    Of a table some rows are read or written: how many follows from the step, which ones does not.
    """

    memory: int
    memory_bytes: int
    place: str
    size_bytes: int
    is_rows: bool = False


def distinct_bytes(extents: Iterable[Extent]) -> int:
    """Add up parts of tensors: the same part once, and of one memory no more than there is."""
    found: dict[int, int] = {}
    whole: dict[int, int] = {}
    for extent in dict.fromkeys(extents):
        found[extent.memory] = found.get(extent.memory, 0) + extent.size_bytes
        whole[extent.memory] = extent.memory_bytes
    return sum(min(size_bytes, whole[memory]) for memory, size_bytes in found.items())


@dataclass(frozen=True)
class Launch:
    """One operator that eager would launch; `fuses` says that a compiler joins it with its neighbours.

    `dtype` and `shape` are those of its first result; what depends on data is not `is_known` and counts no bytes.
    Launches of one `call` are the reference of the operator `within`, which a kernel of its own could replace.
    """

    operator: str
    reads: tuple[Extent, ...]
    writes: tuple[Extent, ...]
    fuses: bool
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_known: bool = True
    within: str = ""
    call: int = 0

    @property
    def read_bytes(self) -> int:
        """What it reads; one part that it is given twice is read once."""
        return distinct_bytes(self.reads)

    @property
    def written_bytes(self) -> int:
        return sum(extent.size_bytes for extent in self.writes)

    @property
    def size_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass
class Meter:
    """Notes the operators that run while it watches; tensors of it have sizes and dtypes and no memory.

    `reference_of` gives for an operator's name what it is made of, or None where it is launched as it stands.
    """

    reference_of: Callable[[str], Callable[..., Any] | None] = lambda name: None
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._sizes = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._sizes, allow_non_fake_inputs=True)
        self._memory: dict[int, int] = {}
        self._within, self._calls = "", 0
        self._kept: list[Tensor] = []  # memory that is given back may be another's next

    def tensor(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, device: str) -> Tensor:
        """Make a tensor.

        Tensors:
            ->  [..]  any  of the given shape, without memory
        """
        with self._mode:
            made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        self.memory_of(made)
        return made

    def memory_of(self, value: Tensor) -> int:
        """Return the number of a tensor's memory, which its views share.

        Tensors:
            value  [..]  any
        """
        place = storage_of(value)
        if place not in self._memory:
            self._memory[place] = len(self._memory)
            self._kept.append(value)
        return self._memory[place]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs in the block."""
        with self._mode, torch.no_grad(), self._sizes.ignore_fresh_unbacked_symbols(), Watching(self._around):
            yield

    def _around(self, name: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reference = self.reference_of(name.partition(".")[0]) if not self._within else None
        if reference is not None:
            return self._inside(name.partition(".")[0], reference, args, kwargs)
        space, _, full = name.partition("::")
        if space != "prim" and _is_composite(name):
            with Watching(self._around):
                return operator.decompose(*args, **kwargs)
        result = operator(*args, **kwargs)
        short = full.partition(".")[0]
        if space == "prim" or short in _EMPTY:
            return result
        given = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = _written(operator, args, kwargs)
        known = {self.memory_of(tensor) for tensor in given}
        made = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        made = [tensor for tensor in made if self.memory_of(tensor) not in known]
        if made or written:
            self.launches.append(self._launch(name, short, space, operator, given, written, made))
        return result

    def _inside(self, name: str, reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what an operator is made of."""
        self._within, self._calls = name, self._calls + 1
        try:
            with Watching(self._around):
                return reference(*args, **kwargs)
        finally:
            self._within = ""

    def _launch(
        self, name: str, short: str, space: str, operator: Any, given: list[Tensor], written: list[Tensor],
        made: list[Tensor],
    ) -> Launch:  # fmt: skip
        read = list(given)
        if written and (short in _OVERWRITES or short in _SCATTERS or space != "aten"):
            read = [tensor for tensor in given if not any(tensor is each for each in written)]
        reads = [self._extent(tensor) for tensor in read]
        writes = [self._extent(tensor) for tensor in [*written, *made]]
        if short in _GATHERS and reads and made:
            reads[0] = self._rows(reads[0], writes[0].size_bytes)
        if short in _SCATTERS and reads:
            writes[0] = self._rows(writes[0], reads[-1].size_bytes)
        outputs = [*written, *made]
        tags = {tag.name for tag in operator.tags}
        return Launch(
            operator=name,
            reads=tuple(reads),
            writes=tuple(writes),
            fuses=space == "aten" and (bool(tags & {"pointwise", "reduction"}) or short in _FUSIBLE),
            dtype=str(outputs[0].dtype).removeprefix("torch."),
            shape=tuple(size if isinstance(size, int) else -1 for size in outputs[0].shape),
            is_known=all(_distinct_bytes(tensor) is not None for tensor in [*given, *outputs]),
            within=self._within,
            call=self._calls if self._within else 0,
        )

    def _extent(self, tensor: Tensor) -> Extent:
        place = f"{tensor.storage_offset()} {tuple(tensor.shape)} {tuple(tensor.stride())} {tensor.dtype}"
        whole = tensor.untyped_storage().nbytes()
        known = _distinct_bytes(tensor) or 0
        return Extent(self.memory_of(tensor), whole if isinstance(whole, int) else known, place, known)

    def _rows(self, extent: Extent, size_bytes: int) -> Extent:
        """Return some rows of a tensor: nobody knows which."""
        fewer = min(size_bytes, extent.size_bytes)
        return replace(extent, place=f"rows {len(self.launches)}", size_bytes=fewer, is_rows=True)


def _is_composite(name: str) -> bool:
    """Tell whether an operator is no more than others that it calls."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def _distinct_bytes(tensor: Tensor) -> int | None:
    """Count a tensor's bytes, those of a row that is repeated once; None where its size depends on data."""
    size = tensor.element_size()
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        if not isinstance(length, int):
            return None
        if step != 0 or length == 0:
            size *= length
    return size


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes in place, as its schema says."""
    found: list[Tensor] = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
