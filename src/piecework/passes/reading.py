"""How passes read a traced graph: what a node calls, what it gives, and who else needs it.

A trace holds torch's functions and methods as the model wrote them, so one operation has several spellings. Patterns
are written over these functions and not over spellings.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from piecework.seam.kinds import mutated_arguments
from piecework.values.signature import TensorSpec

_CASTS = {"to", "type_as", "float", "half", "bfloat16", "double", "type"}


class Miss(Exception):
    """A place that begins like a pattern and is none; the message says why it was left alone."""


def called(node: Any) -> str:
    """Return the name of the function or method that a node calls: `mul` for `*`, `torch.mul` and `.mul`.

    Nothing where the tensor is given by keyword: patterns read what they look at by its place.
    """
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method") or not node.args:
        return ""
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def spec_of(node: Any) -> TensorSpec | None:
    """Return what a node gives, if that is one tensor."""
    found = node.meta.get("spec") if isinstance(node, fx.Node) else None
    return found if isinstance(found, TensorSpec) else None


def dtype_of(node: Any) -> str:
    """Return the dtype of a node's tensor, or nothing."""
    found = spec_of(node)
    return found.dtype if found is not None else ""


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument by place or by name."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def is_cast(node: Any) -> bool:
    """Tell whether a node gives its argument in another dtype, or in the same, and does nothing else."""
    if called(node) not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    made, given = spec_of(node), spec_of(node.args[0])
    return made is not None and given is not None and (made.shape, made.device) == (given.shape, given.device)


def uncast(node: Any) -> Any:
    """Step back over casts that change nothing."""
    while is_cast(node) and dtype_of(node) == dtype_of(node.args[0]):
        node = node.args[0]
    return node


def is_method_like(node: Any, *names: str) -> bool:
    """Tell whether a node calls one of these, on a tensor."""
    return called(node) in names and spec_of(node) is not None


def pair(node: fx.Node) -> tuple[Any, Any]:
    """Return the two operands of a sum or product; a factor beside them is a miss."""
    if node.kwargs or len(node.args) != 2:
        raise Miss(f"`{node.name}` has more than two operands")
    return node.args[0], node.args[1]


def either(node: fx.Node, test: Any) -> tuple[Any, Any] | None:
    """Return the operands of a sum or product, that first for which the test holds; None where it holds for none."""
    first, second = pair(node)
    if test(first):
        return first, second
    return (second, first) if test(second) else None


def only_user(node: fx.Node) -> fx.Node:
    """Return the one user of a node; another is a miss: the value would have to be computed all the same."""
    users = list(node.users)
    if len(users) != 1:
        raise Miss(f"`{node.name}` has {len(users)} users")
    return users[0]


def require_private(nodes: Collection[fx.Node], inside: Collection[fx.Node]) -> None:
    """Raise a miss where a value inside a match is read outside of it."""
    for node in nodes:
        stranger = next((user for user in node.users if user not in inside), None)
        if stranger is not None:
            raise Miss(f"`{stranger.name}` reads `{node.name}` too")


_LAYOUT_READERS = ("view", "as_strided", "view_as", "stride")


def require_unseen_layout(node: fx.Node) -> None:
    """Raise a miss where it is seen that a value lies in an order of its own, which an operator need not keep."""
    spec = spec_of(node)
    if spec is None or spec.stride is None:
        return
    for user in node.users:
        if user.op == "output" or called(user) in _LAYOUT_READERS:
            raise Miss(f"`{user.name}` sees that `{node.name}` lies in strides {list(spec.stride)}")


def is_vector_of(node: Any, width: Any) -> bool:
    """Tell whether a node gives one row of a width."""
    found = spec_of(node)
    return found is not None and found.shape == (width,)


def slice_of_last(node: Any) -> tuple[fx.Node, Any, Any, Any] | None:
    """Read `x[..., a:b:c]`: the tensor, start, stop and step; None for any other node."""
    if called(node) != "getitem" or spec_of(node) is None:
        return None
    source, index = node.args
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice):
        return None
    return source, index[1].start, index[1].stop, index[1].step


def last_size(node: Any) -> Any:
    """Return the size of a tensor's last dimension."""
    found = spec_of(node)
    return found.shape[-1] if found is not None and found.shape else None


def part_of_last(node: Any) -> tuple[fx.Node, int, int] | None:
    """Read a part of a tensor's last dimension however it was taken: the tensor, where it begins and where it ends."""
    sliced = slice_of_last(node)
    if sliced is not None:
        source, start, stop, step = sliced
        width = last_size(source)
        if (
            not isinstance(width, int)
            or step not in (None, 1)
            or not all(isinstance(v, int | None) for v in (start, stop))
        ):
            return None
        return (source, *slice(start, stop).indices(width)[:2])
    if called(node) != "getitem" or called(node.args[0]) not in ("chunk", "split", "split_with_sizes"):
        return None
    many, index = node.args
    source, dim = many.args[0], argument(many, 2, "dim", 0)
    spec, width = spec_of(source), last_size(node)
    if spec is None or not isinstance(index, int) or dim not in (-1, len(spec.shape) - 1):
        return None
    widths = [each.shape[-1] for each in many.meta["spec"]]
    if not all(isinstance(each, int) for each in widths):
        return None
    first = sum(widths[: index % len(widths)])
    return source, first, first + width


def call(graph: fx.Graph, form: str, *args: Any) -> fx.Node:
    """Insert a call of one of our operators."""
    return graph.call_function(getattr(torch.ops.piecework, form), args)


def form_of(node: Any) -> str:
    """Return which of our operators a node calls, without the namespace; nothing for any other node."""
    packet = getattr(node.target, "overloadpacket", node.target) if isinstance(node, fx.Node) else None
    name = str(getattr(packet, "_qualified_op_name", ""))
    return name.removeprefix("piecework::") if name.startswith("piecework::") else ""


def replace(node: fx.Node, made: fx.Node) -> None:
    """Let all users of a node read another; what nothing reads any more goes.

    A view of the old result may rely on its layout: it is then given a contiguous one.
    """
    if any(called(user) in ("view", "as_strided", "view_as") for user in node.users):
        spec = spec_of(node)
        if spec is not None and spec.stride is None:
            with node.graph.inserting_before(node):
                made = node.graph.call_method("contiguous", (made,))
    node.replace_all_uses_with(made)
    drop(node)


def drop(node: fx.Node) -> None:
    """Erase a call that nothing reads, and what was computed for it alone."""
    waiting, gone = [node], set()
    while waiting:
        each = waiting.pop()
        if each in gone or each.users or not each.op.startswith("call") or mutated_arguments(each):
            continue
        waiting += each.all_input_nodes
        each.graph.erase_node(each)
        gone.add(each)  # two that go may read one value
