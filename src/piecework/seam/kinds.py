"""What a graph node does: which operator it calls, whether it writes in place, whether it only views or allocates."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

_VIEWS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "t", "narrow",
    "select", "as_strided", "unflatten", "flatten", "swapaxes", "movedim", "split", "chunk", "unbind", "detach", "size",
    "split_with_sizes", "tensor_split", "getitem", "real", "imag", "diagonal", "unfold", "contiguous",
}  # fmt: skip
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_IN_PLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem, operator.ifloordiv,
    operator.iand, operator.ior, operator.ixor, operator.imod, operator.ipow,
}  # fmt: skip
_NUMPY = "wrapped_"  # how torch names its stand-ins for NumPy's functions, methods and operators
_NUMPY_WRITES = {f"{_NUMPY}{name}" for name in ("fill", "sort", "partition", "put", "itemset", "resize")} | {
    f"{_NUMPY}{name}" for each in _IN_PLACE_OPERATORS for name in (each.__name__, f"__{each.__name__}__")
}
_AUTOGRAD = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"}


def operator_name(node: fx.Node) -> str:
    """Return `ns::op.overload` or `ns::op` of an operator call, else an empty string."""
    target = node.target
    if node.op != "call_function":
        return ""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}::{target._opname}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    return ""


def names_operator(node: fx.Node, wanted: frozenset[str]) -> str:
    """Return the wanted name (`ns::op` or `ns::op.overload`) that a node calls, else an empty string."""
    name = operator_name(node)
    if not name:
        return ""
    short, _, overload = name.partition(".")
    candidates = (short, f"{short}.{overload or 'default'}")
    return next((candidate for candidate in candidates if candidate in wanted), "")


def mutated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors that a node writes in place."""
    kind = _writes(node.op, node.target)
    if kind is NEVER and not node.kwargs:
        return ()
    if isinstance(kind, tuple):
        written: list[fx.Node] = []
        for index, name in kind:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
            items = value if isinstance(value, list | tuple) else [value]
            written.extend(item for item in items if isinstance(item, fx.Node))
        return tuple(written)
    out = node.kwargs.get("out")
    found = [out] if isinstance(out, fx.Node) else []
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if first is not None and (kind is FIRST or node.kwargs.get("inplace") is True):
        found.append(first)
    return tuple(found)


def written_placeholders(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the inputs of a graph whose memory it writes, by themselves or by a view of them."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    waiting = [(a, storage_of(a.meta.get("example_value"))) for node in graph.nodes for a in mutated_arguments(node)]
    while waiting:
        node, memory = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            found[node] = None
        # What another input shares with this one, as two views of one arena do, is not written for that.
        waiting += [(source, memory) for source in node.all_input_nodes if memory and _lies_in(source, memory)]
    return tuple(found)


def _lies_in(node: fx.Node, memory: int) -> bool:
    value = node.meta.get("example_value")
    items = value if isinstance(value, list | tuple) else [value]
    return any(storage_of(item) == memory for item in items)


NEVER, FIRST = "never", "first"


@cache
def _writes(op: str, target: Any) -> str | tuple[tuple[int, str], ...]:
    """Say what a call of `target` writes: the arguments that its schema marks, its first one, or nothing."""
    if op == "placeholder" or op == "output":
        return NEVER
    schema = _schema(target) if op == "call_function" else None
    if schema is not None:
        marked = [(index, a) for index, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        return tuple((index, argument.name) for index, argument in marked) or NEVER
    name = str(target) if op == "call_method" else getattr(target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return FIRST if in_place or target in _IN_PLACE_OPERATORS or name in _NUMPY_WRITES else NEVER


def _schema(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()
        target = getattr(target, overloads[0]) if len(overloads) == 1 else None
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def is_trivial(node: fx.Node) -> bool:
    """Tell whether a node only allocates, only views, or takes an item: work without a kernel."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _VIEWS or name in _ALLOCATIONS


def is_view(node: fx.Node) -> bool:
    """Tell whether a node may give a view of its first argument, or takes an item of a tuple of them."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _VIEWS


def is_state(node: fx.Node) -> bool:
    """Tell whether a node switches a mode for the nodes after it (autocast, gradients): such a span must not be cut."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _AUTOGRAD


def storage_of(value: Any) -> int:
    """Return what identifies the memory of a traced tensor: equal for a tensor and its views.

    What `torch.func` wraps inside a transform lies where the tensor below it does.
    """
    if not isinstance(value, torch.Tensor):
        return 0
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return int(value.untyped_storage()._cdata)
