"""What an operator's schema and fake promise, held against what its body does, while a traced graph runs for real.

A graph is cut, ordered and compiled by what schemas and fakes say. An operator that writes what it does not
declare, gives back its argument, or has a fake that describes another result makes programs silently wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecework.errors import ContractError
from piecework.seam.kinds import mutated_arguments, operator_name, storage_of
from piecework.seam.shadow import ShadowRun

OWN_SPACES = frozenset(("aten", "prims", "prim", "inductor", "higher_order", "_c10d_functional", "profiler"))
_MOST_BYTES = 1 << 26


def calls_operators(graph: fx.Graph) -> bool:
    """Tell whether a graph calls operators that are not torch's own."""
    return any(_is_custom(node) for node in graph.nodes)


def _is_custom(node: fx.Node) -> bool:
    name = operator_name(node)
    return bool(name) and name.partition("::")[0] not in OWN_SPACES


class CheckedRun(ShadowRun):
    """Run a graph on real values; hold each call of an operator that is not torch's own to its contract.

    Raises ContractError, naming operator and argument; what was written is put back first.
    """

    def run(self, *values: Any, **given: Any) -> Any:
        """Run on the values of the placeholders; note the sizes that they have."""
        self.sizes: dict[Any, int] = {}
        graph: Any = self.module.graph
        places = graph.find_nodes(op="placeholder")
        for node, value in zip(places, values, strict=True):
            example = node.meta.get("example_value")
            if isinstance(value, int) and isinstance(example, torch.SymInt):
                self.sizes[example.node.expr] = value
        self._is_right_here = _holds_at(self.sizes, places)
        return super().run(*values, **given)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; compare its arguments before and after, and its results with what its fake says."""
        if not _is_custom(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        arguments = list(_tensors(n, args, kwargs))
        written = {storage_of(self.env[node]) for node in mutated_arguments(n)}
        before = [_snapshot(tensor) for _, tensor in arguments]
        result = super().run_node(n)
        name = operator_name(n).partition(".")[0]
        for (argument, tensor), old in zip(arguments, before, strict=True):
            if storage_of(tensor) not in written and _changed(tensor, old):
                if old[1] is not None:
                    tensor.detach().copy_(old[1])
                raise undeclared_write(name, argument)
        outputs = result if isinstance(result, tuple | list) else (result,)
        fakes = n.meta.get("example_value")
        fakes = fakes if isinstance(fakes, tuple | list) else (fakes,)
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                check_output(name, index if len(outputs) > 1 else None, output, fakes[index], arguments, self._size)
        return result

    def _size(self, size: Any) -> int | None:
        """Return a size of the fake at this run's sizes, or None where data decide, or the graph is not for them."""
        if isinstance(size, int):
            return size
        if not self._is_right_here:
            return None
        value = size.node.expr.subs(self.sizes)
        return int(value) if value.is_Integer else None


def _holds_at(sizes: Mapping[Any, int], places: Sequence[fx.Node]) -> bool:
    """Tell whether the trace's conditions hold at sizes: where not, its fakes are not to blame for what they say."""
    values = (node.meta.get("example_value") for node in places)
    environment = next((value.node.shape_env for value in values if isinstance(value, torch.SymInt)), None)
    return environment is None or all(bool(guard.expr.subs(sizes) != False) for guard in environment.guards)  # noqa: E712


def undeclared_write(name: str, argument: str) -> ContractError:
    """Return the error of an operator that writes what it does not declare."""
    return _broken(
        name, argument, f"writes its argument `{argument}`, which its schema does not say",
        f"mark it in the schema, as in `Tensor(a!) {argument}`, or write to a copy",
    )  # fmt: skip


def check_output(
    name: str,
    index: int | None,
    output: torch.Tensor,
    fake: Any,
    arguments: Sequence[tuple[str, torch.Tensor]],
    size_of: Callable[[Any], int | None],
) -> None:
    """Raise where a result is an argument's memory, or is not what the fake says at these sizes."""
    what = "result" if index is None else f"result {index}"
    for argument, tensor in arguments:
        if output.numel() and storage_of(output) == storage_of(tensor):
            raise _broken(
                name, argument, f"gives back its argument `{argument}`, or a view of it, as its {what}",
                "return a tensor of its own, as in `.clone()`: what shares memory must stand in the graph",
            )  # fmt: skip
    for kind, expected, got in _differences(output, fake, size_of):
        raise _broken(
            name, what, f"gives a {what} of {kind} `{got}`, where its fake says `{expected}`",
            "let the function registered with `register_fake` describe what the body returns",
        )  # fmt: skip


def _differences(
    output: torch.Tensor, fake: Any, size_of: Callable[[Any], int | None]
) -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(fake, torch.Tensor):
        return
    if output.dtype != fake.dtype:
        yield "dtype", str(fake.dtype).removeprefix("torch."), str(output.dtype).removeprefix("torch.")
    if output.device.type != fake.device.type:
        yield "device", fake.device.type, output.device.type
    shape = [size_of(size) for size in fake.shape]
    if len(shape) != output.dim() or any(s is not None and s != o for s, o in zip(shape, output.shape, strict=True)):
        yield "shape", [s if s is not None else "?" for s in shape], list(output.shape)
        return
    stride = [size_of(step) for step in fake.stride()]
    counted = [d for d, size in enumerate(output.shape) if size > 1 and stride[d] is not None]
    if output.numel() and any(stride[d] != output.stride(d) for d in counted):
        yield "strides", stride, list(output.stride())


def _tensors(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    schema = getattr(node.target, "_schema", None) or _only_schema(node.target)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = [*((names[i] if i < len(names) else f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]
    for name, value in given:
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor):
                yield name, item


def _only_schema(packet: Any) -> Any:
    overloads = packet.overloads()
    return getattr(packet, overloads[0])._schema if len(overloads) == 1 else None


def _snapshot(tensor: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    if tensor.is_inference():  # such a tensor counts no versions, so a copy has to tell
        return 0, tensor.detach().clone()
    small = tensor.numel() * tensor.element_size() <= _MOST_BYTES
    return tensor._version, tensor.detach().clone() if small else None


def _changed(tensor: torch.Tensor, old: tuple[int, torch.Tensor | None]) -> bool:
    version, copy = old
    if copy is None:
        return tensor._version != version
    return has_changed(tensor, copy)


def has_changed(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Tell whether a tensor differs from the copy taken of it; a NaN equals itself."""
    return not torch.equal(_bits(tensor), _bits(copy))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose equality is that of bits: a NaN equals itself."""
    return torch.nan_to_num(tensor, nan=0.5) if tensor.is_floating_point() and tensor.isnan().any() else tensor


def _broken(name: str, argument: str, what: str, hint: str) -> ContractError:
    return ContractError(f"operator `{name}` {what}", hint=hint, facts={"operator": name, "argument": argument})


def _innermost(function: Any) -> Any:
    """Return the user's function under torch's layers of it."""
    while True:
        held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        inner = held.get("func") or held.get("fn")
        if not callable(inner):
            return function
        function = inner


def faults_of_registration(name: str) -> Iterator[tuple[str, str]]:
    """Yield (argument, what is wrong) of an operator `ns::op` as far as its registration shows it."""
    from torch._library.simple_registry import singleton

    space, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, space), short)
    for overload in packet.overloads():
        qualified = f"{name}.{overload}" if overload != "default" else name
        kernel = getattr(getattr(singleton.find(name), "fake_impl", None), "kernel", None)
        keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
        if kernel is None:
            if not any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key) for key in keys):
                yield "", "has no fake: nothing says what it returns"
            continue
        try:
            fake = inspect.signature(_innermost(kernel.func)).parameters
        except (TypeError, ValueError, AttributeError):
            continue
        takes_any = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in fake.values())
        for argument in getattr(packet, overload)._schema.arguments if not takes_any else ():
            parameter = fake.get(argument.name)
            if argument.has_default_value() and parameter is not None and parameter.default is parameter.empty:
                yield argument.name, f"has a default for `{argument.name}` that its fake lacks"


def unused_calls(graph: fx.Graph, kept: Collection[fx.Node]) -> Iterator[str]:
    """Yield the operators that are not torch's own and are called in vain: a compiler removes such a call.

    No result of theirs reaches the graph's result, and neither does it a call that declares an effect. `kept` are calls
    that no one removes: opaque ones.
    """
    from torch._library.utils import is_impure

    def declares_effect(node: fx.Node) -> bool:
        target = node.target
        if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
            target = getattr(target, target.overloads()[0])
        is_call = node.op == "call_function"
        return bool(mutated_arguments(node)) or (is_call and is_impure(target, args=node.args, kwargs=node.kwargs))  # type: ignore[arg-type]

    waiting = [node for node in graph.nodes if node.op == "output" or node in kept or declares_effect(node)]
    needed = set(waiting)
    while waiting:
        found = [source for source in waiting.pop().all_input_nodes if source not in needed]
        needed.update(found)
        waiting.extend(found)
    for node in graph.nodes:
        if node not in needed and _is_custom(node):
            yield operator_name(node).partition(".")[0]
