"""Write the expressions of Inductor's output code anew, against a closed grammar."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from piecework.seam import vocabulary as words
from piecework.seam.vocabulary import Refusal


@dataclass
class ExpressionWriter:
    """Write expressions with the piece's own names; collects the globals and prepared views that they need."""

    parameters: Sequence[str]
    weights: frozenset[str]
    kernels: frozenset[str]
    constants: dict[str, str]
    renamed: dict[str, str] = field(default_factory=dict)
    own_names: dict[str, str] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    header: dict[str, str] = field(default_factory=dict)
    prepared: dict[str, str] = field(default_factory=dict)
    used_kernels: set[str] = field(default_factory=set)
    used_constants: set[str] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)

    def expression(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return self.name(name)
            case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
                return repr(value) if not isinstance(value, float) or value == value else 'float("nan")'
            case ast.Tuple(elts=items):
                inner = ", ".join(map(self.expression, items))
                return f"({inner},)" if len(items) == 1 else f"({inner})"
            case ast.List(elts=items):
                return f"[{', '.join(map(self.expression, items))}]"
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return repr(-value)
            case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
                return f"{'-' if isinstance(node.op, ast.USub) else 'not '}({self.expression(operand)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return f"{self._operand(left)} {_OPERATORS[type(op)]} {self._operand(right)}"
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return f"{self._operand(left)} {_COMPARISONS[type(op)]} {self._operand(right)}"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self.expression(body)} if {self.expression(test)} else {self.expression(orelse)})"
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(index))):
                return f"{self.name(name)}[{index}]"
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
        raise Refusal(f"unknown expression: `{ast.unparse(node)[:120]}`")

    def _operand(self, node: ast.expr) -> str:
        text = self.expression(node)
        return f"({text})" if isinstance(node, ast.BinOp | ast.Compare | ast.UnaryOp) else text

    def name(self, name: str) -> str:
        if name in self.renamed:
            return self.renamed[name]
        if name in self.locals:
            return self.own_names.get(name, name)
        if name in self.constants:
            self.used_constants.add(name)
            return name
        if name in words.CONSTANT_NAMES:
            return f'float("{name}")'
        raise Refusal(f"unknown name: `{name}`")

    def _attribute(self, node: ast.Attribute) -> str:
        path = ast.unparse(node)
        root, _, name = path.rpartition(".")
        if root == "torch" and name in words.DTYPES:
            return self.global_name(f"{name}_" if name == "bool" else name, path)
        if path in ("torch.strided", "torch.contiguous_format", "torch.preserve_format", "torch.channels_last"):
            return self.global_name(name, path)
        raise Refusal(f"unknown attribute: `{path}`")

    def global_name(self, name: str, path: str) -> str:
        if self.header.setdefault(name, path) != path:
            raise Refusal(f"`{name}` stands for `{self.header[name]}` and for `{path}`")
        return name

    # ------------------------------------------------------------------------------------------------------ calls

    def _call(self, node: ast.Call) -> str:
        head = self._head(node.func)
        if head == "torch.device":
            return self._device(node)
        keywords = [k for k in node.keywords if not _is_default(head, k)]
        if any(k.arg is None for k in keywords):
            raise Refusal(f"unknown call: `{ast.unparse(node)[:120]}`")
        arguments = [self.expression(a) for a in node.args]
        if head in self.kernels:  # a Triton kernel's stream is passed by name; ours takes it last
            arguments += [self.expression(k.value) for k in keywords]
        else:
            arguments += [f"{k.arg}={self.expression(k.value)}" for k in keywords]
        if head == words.STREAM:
            arguments = ["device_index"]
        text = f"{head}({', '.join(arguments)})"
        if head == words.VIEW and self._is_constant_view(node):
            return self.prepared.setdefault(text, f"c{len(self.prepared)}")
        return text

    def _is_constant_view(self, node: ast.Call) -> bool:
        base = node.args[0]
        if not (isinstance(base, ast.Name) and self.renamed.get(base.id) in self.weights):
            return False
        return all(isinstance(n, ast.Tuple | ast.Constant | ast.Load) for a in node.args[1:] for n in ast.walk(a))

    def _head(self, func: ast.expr) -> str:
        path = ast.unparse(func)
        root, _, name = path.rpartition(".")
        if path in self.kernels or (root in self.kernels and name == "run"):
            self.used_kernels.add(root or path)
            return root or path
        if path in words.FUNCTIONS:
            return self.global_name(path, words.FUNCTIONS[path])
        if path in words.SCALAR_FUNCTIONS:
            return path
        if root == "math" and name in words.MATH_FUNCTIONS:
            return self.global_name(f"math_{name}", path)
        if root == "extern_kernels" and name in words.EXTERN:
            return self.global_name(name, words.EXTERN[name])
        if path in ("device", "torch.device"):
            return "torch.device"
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and name in words.TENSOR_METHODS:
            return f"{self.name(func.value.id)}.{name}"
        return self._operator(path)

    def _operator(self, path: str) -> str:
        for alias, full in _OPERATOR_ALIASES:
            if path.startswith(alias):
                path = full + path[len(alias) :]
        if not path.startswith("torch.ops."):
            raise Refusal(f"unknown call of `{path}`")
        parts = path.split(".")[2:]
        if parts[0] == "higher_order" or len(parts) not in (2, 3):
            raise Refusal(f"unknown operator `{path}`")
        if parts[0] == "inductor" and parts[1] not in words.NATIVE_INDUCTOR_OPS:
            raise Refusal(f"operator `{path}` exists inside the compiler only")
        self.namespaces.add(parts[0])
        return self.global_name("_".join(parts), path)

    def _device(self, node: ast.Call) -> str:
        values = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
        kind = next((v for v in values if isinstance(v, str)), None)
        if kind not in ("cpu", "cuda"):
            raise Refusal(f"unknown device: `{ast.unparse(node)}`")
        return self.global_name(f"{kind}_device", f'torch.device("{kind}")')


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Div: "/",
    ast.Mod: "%",
    ast.Pow: "**",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_OPERATOR_ALIASES = (
    ("aten.", "torch.ops.aten."),
    ("inductor_ops.", "torch.ops.inductor."),
    ("_quantized.", "torch.ops._quantized."),
)


def _is_default(head: str, keyword: ast.keyword) -> bool:
    """Tell whether `alpha=1` or `beta=1` says what the function does anyway."""
    return (
        head in ("addmm", "baddbmm")
        and keyword.arg in ("alpha", "beta")
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value == 1
    )
