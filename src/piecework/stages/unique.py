"""Unique: every stretch becomes canonical text; equal text is one piece, used at several sites.

Node names, layer indices and the names that opaque calls carry stay out of piece texts; each site keeps
its own weights and names in the plan.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from piecework.errors import SplitError
from piecework.seam.contracts import is_custom
from piecework.seam.fx import format_piece, format_value
from piecework.seam.kinds import mutated_arguments, operator_name, storage_of
from piecework.seam.names import name_of
from piecework.values.graph import NOTHING, PIECE, Binding, OpaqueCall, Plan, Region, SplitGraph, Stretch
from piecework.values.signature import Size, Spec, TensorSpec
from piecework.values.tree import Tree, map_tree

_WORD = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = {"max", "min", "math", "floor", "ceil", "trunc", "round", "sqrt", "abs", "int", "float"}
_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.mod: "%",
    operator.truediv: "/", operator.pow: "**", operator.lt: "<", operator.le: "<=", operator.gt: ">",
    operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


def unique(cut: SplitGraph) -> Plan:
    """Write each stretch as text and keep each distinct text once."""
    names, values = _name_values(cut)
    texts: dict[str, int] = {}
    graph = _Graph(cut, names)
    regions = tuple(_region(stretch, names, graph, texts) for stretch in cut.stretches)
    result = _resolve_result(cut, names, values)
    return Plan(tuple(texts), regions, values, result, cut.split_ops, cut.operators, cut.partition)


def _name_values(cut: SplitGraph) -> tuple[dict[fx.Node, str], dict[str, Binding]]:
    """Give every graph input and every value that leaves a stretch its name in the program."""
    names: dict[fx.Node, str] = {}
    values: dict[str, Binding] = {}
    counts = {"x": 0, "w": 0}
    for node in cut.traced.graph.nodes:
        if node.op != "placeholder":
            continue
        binding = cut.traced.bindings[node.name]
        if binding.kind == "symbol":
            name = binding.name
        else:
            letter = "w" if binding.is_static else "x"
            name, counts[letter] = f"{letter}{counts[letter]}", counts[letter] + 1
        names[node], values[name] = name, binding
    made = 0
    for stretch in cut.stretches:
        for node in stretch.nodes if stretch.kind != PIECE else stretch.outputs:
            names[node], made = f"v{made}", made + 1
    return names, values


def _region(stretch: Stretch, names: Mapping[fx.Node, str], graph: _Graph, texts: dict[str, int]) -> Region:
    if stretch.kind != PIECE:
        calls = tuple(_opaque_call(node, names) for node in stretch.nodes if not _is_item(node))
        return Region(stretch.kind, results=tuple(names[n] for n in stretch.outputs), calls=calls)
    text, arguments, symbols = _piece(stretch, names, graph)
    number = texts.setdefault(text, len(texts))
    results = tuple(names[node] for node in stretch.outputs)
    return Region(PIECE, number, arguments, results, symbols=symbols)


def _is_item(node: fx.Node) -> bool:
    return (
        node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[0].meta.get("example_value"), tuple | list)
    )


def _opaque_call(node: fx.Node, names: Mapping[fx.Node, str]) -> OpaqueCall:
    full = _Numbers(names)
    arguments = [format_value(arg, full) for arg in node.args]
    arguments += [f"{key}={format_value(value, full)}" for key, value in sorted(node.kwargs.items())]
    target = f".{node.target}" if node.op == "call_method" else operator_name(node) or name_of(node.target)  # type: ignore[arg-type]
    value = node.meta.get("example_value")
    if isinstance(value, tuple | list):
        items = {user.args[1]: user for user in node.users if _is_item(user)}
        results = ", ".join(names[items[index]] if index in items else "_" for index in range(len(value)))
        specs = tuple(_promised(items[index]) if index in items else "" for index in range(len(value)))
        results = f"{results}," if len(value) == 1 else results
    else:
        results, specs = names[node] if node.users else "_", (_promised(node) if node.users else "",)
    return OpaqueCall(target, ", ".join(arguments), results, specs if is_custom(node) else ())


def _promised(node: fx.Node) -> str:
    """Return what the fake said of a value: a spec, or `none`."""
    if node.meta.get("example_value") is None:
        return NOTHING
    return str(node.meta.get("spec", ""))


class _Numbers(Mapping[fx.Node, str]):
    """Names of nodes, where a node that computes a number stands for its expression."""

    def __init__(self, names: Mapping[fx.Node, str]) -> None:
        self._names = names

    def __getitem__(self, node: fx.Node) -> str:
        if not node.meta.get("number"):
            return self._names[node]
        inner = [format_value(arg, self) for arg in node.args]
        sign = _INFIX.get(node.target)  # type: ignore[arg-type]
        return f"({inner[0]} {sign} {inner[1]})" if sign else f"{name_of(node.target)}({', '.join(inner)})"  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Graph:
    """What is looked up of the whole graph once: its symbols, its weights, the users of numbers."""

    def __init__(self, cut: SplitGraph, names: Mapping[fx.Node, str]) -> None:
        bindings = cut.traced.bindings
        places = cut.traced.graph.find_nodes(op="placeholder")
        self.symbols = {node: names[node] for node in places if bindings[node.name].kind == "symbol"}
        self.by_name = {name: node for node, name in self.symbols.items()}
        self.static = {node for node in places if bindings[node.name].is_static}
        numbers = [node for node in cut.traced.graph.nodes if node.meta.get("number")]
        self.counting = {user for number in numbers for user in number.users if not user.meta.get("number")}
        self._in_size: dict[Size, tuple[str, ...]] = {}

    def names_in(self, size: Size) -> tuple[str, ...]:
        """Return the declared names that a size speaks of."""
        if size not in self._in_size:
            self._in_size[size] = tuple(word for word in _WORD.findall(str(size)) if word in self.by_name)
        return self._in_size[size]


def _piece(
    stretch: Stretch, names: Mapping[fx.Node, str], graph: _Graph
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    given = [node for node in stretch.inputs if node not in graph.symbols]
    nodes = list(stretch.nodes)
    if not graph.counting.isdisjoint(nodes):
        nodes = _with_numbers(nodes)
    symbols = _symbols(given, stretch.inputs, nodes, graph)
    own = {symbol: f"s{index}" for index, symbol in enumerate(symbols)}
    static = [node for node in given if node in graph.static]
    scalars = [node for node in given if not isinstance(node.meta["spec"], TensorSpec)]
    apart = {*static, *scalars}
    tensors = [node for node in given if node not in apart]
    _check_alias(stretch, tensors)
    parameters = [(graph.by_name[symbol], own[symbol], "int") for symbol in symbols]
    rename = {**own, **{node.meta.get("defines", names[node]): f"u{index}" for index, node in enumerate(scalars)}}
    parameters += [(node, f"u{index}", _scalar(node)) for index, node in enumerate(scalars)]
    parameters += [(node, f"x{index}", str(_rename(node.meta["spec"], rename))) for index, node in enumerate(tensors)]
    parameters += [
        (node, f"w{index}", str(_rename(node.meta["spec"], rename).as_weight())) for index, node in enumerate(static)
    ]
    text = format_piece(parameters, nodes, stretch.outputs)
    return text, tuple(names[node] for node, _, _ in parameters), tuple(symbols)


def _scalar(node: fx.Node) -> str:
    kind = str(node.meta["spec"])
    return "int unbacked" if kind == "int" else kind


def _with_numbers(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Place each number that the nodes need before the first that needs it."""
    placed: set[fx.Node] = set()
    ordered: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source.meta.get("number") and source not in placed:
                placed.add(source)
                place(source)
                ordered.append(source)

    for node in nodes:
        place(node)
        ordered.append(node)
    return ordered


def _symbols(given: Sequence[fx.Node], inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], graph: _Graph) -> list[str]:
    """Return the declared names that a piece's specs and numbers speak of, by first use."""
    found: dict[str, None] = {}
    for node in given:
        spec = node.meta["spec"]
        for size in (*spec.shape, *(spec.stride or ())) if isinstance(spec, TensorSpec) else ():
            if type(size) is str:
                found.update(dict.fromkeys(graph.names_in(size)))
    for node in nodes:
        if node.meta.get("number"):
            found.update(dict.fromkeys(graph.symbols[s] for s in node.all_input_nodes if s in graph.symbols))
    found.update(dict.fromkeys(graph.symbols[node] for node in inputs if node in graph.symbols))
    return list(found)


def _rename(spec: Spec, names: Mapping[str, str]) -> TensorSpec:
    assert isinstance(spec, TensorSpec)
    if all(type(size) is int for size in spec.shape) and spec.stride is None:
        return spec
    stride = None if spec.stride is None else tuple(_rename_size(size, names) for size in spec.stride)
    return TensorSpec(spec.dtype, tuple(_rename_size(size, names) for size in spec.shape), stride, spec.device)


def _rename_size(size: Size, names: Mapping[str, str]) -> Size:
    if type(size) is int:
        return size
    text = str(size)
    return names.get(text) or _WORD.sub(lambda word: names.get(word[0], word[0]), text)


def _check_alias(stretch: Stretch, tensors: Sequence[fx.Node]) -> None:
    """Refuse a piece that writes a tensor of which it is handed a second view: the compiler takes them for two."""
    written = {argument for node in stretch.nodes for argument in mutated_arguments(node)}
    if not written:
        return
    memory: dict[int, fx.Node] = {}
    touched = {storage_of(node.meta.get("example_value")) for node in written}
    for node in tensors:
        place = storage_of(node.meta["example_value"])
        if place in memory and place in touched:
            raise SplitError(
                f"a piece writes in place to `{node.name}`, and `{memory[place].name}` is another view of its memory",
                hint="take the view after the opaque call, or write out of place",
            )
        memory[place] = node


def _resolve_result(cut: SplitGraph, names: Mapping[fx.Node, str], values: Mapping[str, Binding]) -> Tree:
    """Rewrite the result's leaves as expressions over program values."""
    outputs: Any = cut.traced.graph.output_node().args[0]
    full = _Numbers(names)
    symbols = {binding.name: name for name, binding in values.items() if binding.kind == "symbol"}
    by_binding = {(binding.kind == "input", binding.name): name for name, binding in values.items()}

    def leaf(tree: Tree) -> Tree:
        if "output" in tree:
            return {"kind": "value", "expression": format_value(outputs[tree["output"]], full)}
        if "input" in tree:
            return {"kind": "value", "expression": by_binding.get((True, tree["input"]), f"argument:{tree['input']}")}
        if "symbol" in tree:
            return {"kind": "value", "expression": symbols[tree["symbol"]]}
        if "static" in tree:
            return {"kind": "value", "expression": by_binding[False, tree["static"]]}
        return tree

    return map_tree(leaf, cut.traced.result)
