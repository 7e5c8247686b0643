"""Trace: a model and example inputs become one full graph whose inputs are named.

Dynamo runs at sizes of our own choice (never 0 or 1); weights, buffers and constants are recognised by
identity; the result's structure is recovered, so that neither a cold nor a warm program passes through
Dynamo when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from piecework.errors import GuardError, TraceError
from piecework.seam import dynamo
from piecework.seam.fake import without_weights
from piecework.seam.symbols import SymbolTable, use_symbols
from piecework.values.arguments import LeafDims, bind_arguments, dynamic_leaves, resize, trace_sizes
from piecework.values.declaration import Dim, Dynamic
from piecework.values.graph import Binding, InputLeaf, ShapeGuard, SymbolSource, TracedGraph
from piecework.values.signature import ScalarSpec, Spec, TensorSpec
from piecework.values.tree import Tree, describe, leaves


def trace(
    model: torch.nn.Module, example: Sequence[Any] | Mapping[str, Any], dynamic: Dynamic, *, device: str = "cpu"
) -> TracedGraph:
    """Trace `model` to one full graph for the presence pattern of `example`.

    A model whose parameters are on the meta device is traced without weights, as if they were on `device`.
    """
    given = bind_arguments(model.forward, example)
    dims = dynamic_leaves(given, dynamic)
    _check_linked(given, dims)
    resized = resize(given, dims, trace_sizes(dims, 0))
    with without_weights(model, resized, device) as arguments:
        inputs = [(path, leaf) for name, value in arguments.items() for path, leaf in leaves(value, name)]
        before = _attributes(model)
        captured, result = dynamo.capture(model, (), arguments, _marks(inputs, dims))
        _refuse_writes(model, before)
        try:
            return _assemble(model, captured, result, arguments, inputs, dims)
        finally:
            dynamo.release(captured)


def _assemble(
    model: torch.nn.Module,
    captured: dynamo.Capture,
    result: Any,
    arguments: Mapping[str, Any],
    inputs: Sequence[tuple[str, Any]],
    dims: Sequence[LeafDims],
) -> TracedGraph:
    graph = captured.graph.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    named = _name_inputs(model, captured.inputs, inputs)
    by_path = {binding.name: node for node, binding in zip(placeholders, named, strict=True) if binding}
    table = SymbolTable(_name_symbols(by_path, dims))
    for node in graph.nodes:
        if node.meta.get("example_value") is not None:
            node.meta["spec"] = table.spec(node.meta["example_value"])
    tree = _describe_result(captured, result, arguments, inputs, named, dims)
    environment = _shape_environment(placeholders)
    symbols = use_symbols(graph, table)
    bindings = {node.name: Binding("symbol", name, ScalarSpec("int")) for name, node in symbols.items()}
    for node, binding in zip(placeholders, named, strict=True):
        if binding is not None:
            bindings[node.name] = Binding(binding.kind, binding.name, node.meta["spec"], binding.aliases, binding.is_persistent)
    constants = {b.name: value for b, value in zip(named, captured.inputs, strict=True) if b and b.kind == "constant"}
    return TracedGraph(
        graph=graph,
        bindings=bindings,
        inputs=_input_leaves(inputs, by_path, table, dims),
        arguments=tuple(arguments),
        symbols=_symbol_sources(dims),
        result=tree,
        constants=constants,
        shape_guards=_shape_guards(environment, table),
        guards=tuple(captured.guards),
        code=tuple(dict.fromkeys(captured.code)),
    )


def _check_linked(arguments: Mapping[str, Any], dims: Sequence[LeafDims]) -> None:
    tensors = {path: leaf for name, value in arguments.items() for path, leaf in leaves(value, name)}
    seen: dict[str, tuple[int, str]] = {}
    for leaf in dims:
        for dim, mark in leaf.dims.items():
            size, place = tensors[leaf.path].shape[dim], f"{leaf.path}.shape[{dim}]"
            known = seen.setdefault(mark.name, (size, place))
            if known[0] != size:
                raise GuardError(
                    f"dimension `{mark.name}` is `{known[0]}` at `{known[1]}` and `{size}` at `{place}`",
                    hint="dimensions of one name have one size; give the second a name of its own",
                )


def _marks(inputs: Sequence[tuple[str, Any]], dims: Sequence[LeafDims]) -> list[dynamo.DimMark]:
    tensors = dict(inputs)
    return [
        dynamo.DimMark(tensors[leaf.path], dim, mark.name, mark.kind) for leaf in dims for dim, mark in leaf.dims.items()
    ]


def _attributes(model: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Return every plain attribute and buffer of every module, to see afterwards which of them forward wrote."""
    hidden = {"_parameters", "_modules", "training"}
    return {
        (path, name): dict(value) if name == "_buffers" else value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in hidden and not (name.startswith("_") and name != "_buffers" and "hooks" in name)
    }


def _refuse_writes(model: torch.nn.Module, before: Mapping[tuple[str, str], Any]) -> None:
    after = _attributes(model)
    for key in {**before, **after}:
        old, new = before.get(key, _attributes), after.get(key, _attributes)
        same = old is new or (isinstance(new, int | float | str | bool | dict) and type(old) is type(new) and _equal(old, new))
        if same:
            continue
        path, name = key
        module = model.get_submodule(path)
        if old is _attributes:
            delattr(module, name)
        elif name != "_buffers":
            setattr(module, name, old)
        raise TraceError(
            f"forward writes the attribute `{f'{path}.{name}' if path else name}`",
            hint="a compiled forward does not run its Python again: return the value, or keep it in an opaque operator",
            facts={"attribute": name, "module": path},
        )


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(old[key] is new[key] for key in old)
    return bool(old == new)


def _name_inputs(model: torch.nn.Module, values: Sequence[Any], inputs: Sequence[tuple[str, Any]]) -> list[Binding | None]:
    """Say what each graph input is, by identity; symbols' own placeholders give None."""
    static = _static_names(model)
    leaf_paths = {id(leaf): path for path, leaf in reversed(inputs) if isinstance(leaf, torch.Tensor)}
    attributes = {id(value): name for name, value in _plain_tensors(model)}
    named: list[Binding | None] = []
    constants = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            named.append(None)
        elif id(value) in leaf_paths:
            named.append(Binding("input", leaf_paths[id(value)]))
        elif id(value) in static:
            named.append(static[id(value)])
        else:
            named.append(Binding("constant", attributes.get(id(value), f"constant_{constants}")))
            constants += id(value) not in attributes
    return named


def _static_names(model: torch.nn.Module) -> dict[int, Binding]:
    names: dict[int, list[tuple[str, str, bool]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(("weight", name, True))
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(("buffer", name, name in persistent))
    return {
        key: Binding(found[0][0], found[0][1], None, tuple(name for _, name, _ in found[1:]), found[0][2])
        for key, found in names.items()
    }


def _plain_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_"):
                prefix = f"{path}.{name}" if path else name
                yield from ((p, leaf) for p, leaf in leaves(value, prefix) if isinstance(leaf, torch.Tensor))


def _name_symbols(by_path: Mapping[str, torch.fx.Node], dims: Sequence[LeafDims]) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for leaf in dims:
        node = by_path.get(leaf.path)
        if node is None:
            continue
        for dim, mark in leaf.dims.items():
            size = node.meta["example_value"].shape[dim]
            expression = size.node.expr if not isinstance(size, int) else None
            if expression is None or not expression.is_Symbol:
                raise GuardError(
                    f"dimension `{mark.name}` (`{leaf.path}.shape[{dim}]`) comes out as `{size}`: the model fixes it",
                    hint="leave it out of `dynamic`, or change the line that fixes it",
                )
            names.setdefault(expression, mark.name)
    return names


def _describe_result(
    captured: dynamo.Capture,
    result: Any,
    arguments: Mapping[str, Any],
    inputs: Sequence[tuple[str, Any]],
    named: Sequence[Binding | None],
    dims: Sequence[LeafDims],
) -> Tree:
    """Match each leaf of the result with the graph output, input or constant that it is.

    A leaf that is none of these is a Python value; it must come out equal at other sizes, which a second
    run shows, or it would silently stay what it was at the trace.
    """
    tree = describe(result, _leaf_matcher(captured, inputs, named))
    claimed = {leaf["output"] for leaf in _tree_leaves(tree) if "output" in leaf}
    unclaimed = set(range(len(captured.results))) - claimed
    if unclaimed:
        raise TraceError(
            f"the graph computes `{len(unclaimed)}` value(s) that the result does not hold",
            hint="forward stores a tensor somewhere, or turns one into a Python number: return the tensor instead",
        )
    if any(leaf["kind"] == "constant" and leaf["value"] is not None for leaf in _tree_leaves(tree)):
        other = resize(arguments, dims, trace_sizes(dims, 1))
        again = [(path, leaf) for name, value in other.items() for path, leaf in leaves(value, name)]
        second = describe(captured.run((), other), _leaf_matcher(captured, again, named))
        for one, two in zip(_tree_leaves(tree), _tree_leaves(second), strict=True):
            if one != two:
                raise TraceError(
                    f"the result holds a Python number that depends on a size: `{one['value']!r}`, then `{two.get('value')!r}`",
                    hint="return a tensor, or the size itself",
                )
    return tree


def _leaf_matcher(captured: dynamo.Capture, inputs: Sequence[tuple[str, Any]], named: Sequence[Binding | None]) -> Any:
    outputs = {id(value): index for index, value in enumerate(captured.results) if isinstance(value, torch.Tensor)}
    paths = {id(leaf): path for path, leaf in inputs if isinstance(leaf, torch.Tensor)}
    static = {id(v): b.name for v, b in zip(captured.inputs, named, strict=True) if b and b.is_static}

    def match(path: str, leaf: Any) -> Tree:
        if isinstance(leaf, dynamo.OutputInt):
            return {"kind": "value", "output": leaf.position}
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in outputs:
                return {"kind": "value", "output": outputs[id(leaf)]}
            if id(leaf) in paths:
                return {"kind": "value", "input": paths[id(leaf)]}
            if id(leaf) in static:
                return {"kind": "value", "static": static[id(leaf)]}
            raise TraceError(
                f"`{path}` is a tensor that neither the graph nor the caller made",
                hint="register it as a buffer, or compute it in forward",
            )
        if leaf is None or isinstance(leaf, int | float | str | bool):
            return {"kind": "constant", "value": leaf}
        raise TraceError(f"`{path}` is a `{type(leaf).__name__}`, which a program cannot return")

    return match


def _tree_leaves(tree: Tree) -> Iterator[Tree]:
    if "items" not in tree:
        yield tree
        return
    for item in tree["items"]:
        yield from _tree_leaves(item[1] if tree["kind"] in ("dict", "object") else item)


def _input_leaves(
    inputs: Sequence[tuple[str, Any]], by_path: Mapping[str, torch.fx.Node], table: SymbolTable, dims: Sequence[LeafDims]
) -> tuple[InputLeaf, ...]:
    marks = {leaf.path: leaf.dims for leaf in dims}
    first: dict[int, str] = {}
    found = []
    for path, leaf in inputs:
        if not isinstance(leaf, torch.Tensor):
            found.append(InputLeaf(path, None, leaf))
            continue
        node = by_path.get(path)
        spec: Spec = node.meta["spec"] if node is not None else _declared_spec(leaf, marks.get(path, {}), table)
        found.append(InputLeaf(path, spec, same_as=first.setdefault(id(leaf), path) if id(leaf) in first else ""))
        first.setdefault(id(leaf), path)
    return tuple(found)


def _declared_spec(leaf: torch.Tensor, marks: Mapping[int, Dim], table: SymbolTable) -> TensorSpec:
    """Describe an input that the graph does not read: its declared dimensions by name, no strides asked."""
    plain = table.spec(leaf)
    assert isinstance(plain, TensorSpec)
    shape = tuple(marks[dim].name if dim in marks else size for dim, size in enumerate(plain.shape))
    return TensorSpec(plain.dtype, shape, None, plain.device)


def _symbol_sources(dims: Sequence[LeafDims]) -> tuple[SymbolSource, ...]:
    places: dict[str, list[tuple[str, int]]] = {}
    marks: dict[str, Dim] = {}
    for leaf in dims:
        for dim, mark in leaf.dims.items():
            places.setdefault(mark.name, []).append((leaf.path, dim))
            marks.setdefault(mark.name, mark)
    return tuple(SymbolSource(n, marks[n].kind, tuple(p), marks[n].low, marks[n].high) for n, p in places.items())


def _shape_environment(placeholders: Sequence[torch.fx.Node]) -> Any:
    for node in placeholders:
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    return None


def _shape_guards(environment: Any, table: SymbolTable) -> tuple[ShapeGuard, ...]:
    if environment is None:
        return ()
    found = []
    for guard in environment.guards:
        known = all(symbol in table.names for symbol in guard.expr.free_symbols)
        if known:
            found.append(ShapeGuard(str(table.text(guard.expr)), str(getattr(guard.sloc, "user_loc", "") or guard.sloc)))
    return tuple(dict.fromkeys(found))
