"""Free the compiler's output code of its compile machinery.

In: the module that Inductor wrote (kernel sources, asynchronous compilation, benchmark, asserts, boxed arguments).
Out: a short text with `prepare(w0, …)`, run once per site, and `call(s0, …, x0, …)`, run on every step; kernels, weights
and prepared views are globals. The module is read by `ast` against a closed grammar: what is not known is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from piecework.seam import vocabulary as words


class Refusal(Exception):
    """The output code holds something that the grammar does not know; the message names it."""


@dataclass(frozen=True)
class StrippedText:
    """The text, and what it calls beside functions of torch."""

    text: str
    kernels: tuple[str, ...]
    namespaces: tuple[str, ...]
    returns: tuple[str, ...]


def strip_output(
    source: str,
    parameters: Sequence[str],
    weights: Sequence[str],
    constants: Mapping[str, str] | None = None,
    aligned: Mapping[str, bool] | None = None,
) -> StrippedText:
    """Reduce output code to what runs.

    `parameters` name the graph's inputs in order, `weights` those that are bound once; `constants` give the tensors which
    the graph holds itself, as expressions; `aligned` those inputs that kernels take for aligned, and whether they are
    written to (a copy would then be wrong, so that a misaligned one is an error).
    """
    module = ast.parse(source)
    kernels, call = _scan_module(module)
    body = _Body(parameters, frozenset(weights), frozenset(kernels), dict(constants or {}))
    statements = [*body.align(aligned or {}), *body.rewrite(call.body)]
    return body.finish(statements, kernels)


# ------------------------------------------------------------------------------------------------------- the module

_PREPARED = re.compile(r"c\d+")
_IGNORED_FUNCTIONS = frozenset(("get_args", "benchmark_compiled_module"))
_IGNORED_TARGETS = frozenset(("async_compile", "runner", "call", "recursively_apply_fns"))


def _scan_module(module: ast.Module) -> tuple[tuple[str, ...], ast.FunctionDef]:
    """Find the kernels' names and the function that runs; refuse a module that does more."""
    kernels: list[str] = []
    call: ast.FunctionDef | None = None
    for statement in module.body:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Delete() | ast.If() | ast.Expr(value=ast.Constant()):
                pass  # what is imported and not called cannot matter; what is called is checked where it is called
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if _is_kernel(value):
                    kernels.append(name)
                elif name == "runner" and ast.unparse(value) != "Runner(partitions=[])":
                    raise Refusal(f"output code runs in partitions: `{ast.unparse(value)}`")
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile"), attr="wait"))):
                pass
            case ast.ClassDef(name="Runner", body=methods):
                call = next((m for m in methods if isinstance(m, ast.FunctionDef) and m.name == "call"), None)
            case ast.FunctionDef(name="call"):
                call = statement
            case ast.FunctionDef(name=name) if name in _IGNORED_FUNCTIONS:
                pass
            case _:
                raise Refusal(f"output code has an unknown part: `{ast.unparse(statement)[:120]}`")
    if call is None:
        raise Refusal("output code has no function `call`")
    return tuple(kernels), call


def _is_kernel(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and isinstance(value.func.value, ast.Name)
        and value.func.value.id == "async_compile"
    )


# --------------------------------------------------------------------------------------------------------- the body


@dataclass
class _Body:
    """Rewrite the statements of `call`; collects the globals and prepared views that they need."""

    parameters: Sequence[str]
    weights: frozenset[str]
    kernels: frozenset[str]
    constants: dict[str, str]
    renamed: dict[str, str] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    header: dict[str, str] = field(default_factory=dict)
    prepared: dict[str, str] = field(default_factory=dict)
    used_kernels: set[str] = field(default_factory=set)
    own_names: dict[str, str] = field(default_factory=dict)
    namespaces: set[str] = field(default_factory=set)
    returns: tuple[str, ...] = ()

    def rewrite(self, statements: Sequence[ast.stmt]) -> list[str]:
        lines: list[str] = []
        for statement in _flatten(statements):
            lines.extend(self._statement(statement))
        while len(lines) > 1 and lines[-2].startswith("del "):
            del lines[-2]  # the return frees it anyway
        return lines

    def align(self, inputs: Mapping[str, bool]) -> list[str]:
        """Copy or check inputs that kernels take for aligned."""
        lines = []
        for name, is_written in inputs.items():
            word = words.CHECK_ALIGNED if is_written else words.ALIGN
            text = f"{self._global(word, words.FUNCTIONS[word])}({name})"
            if name in self.weights:
                self.prepared[text] = name
            else:
                lines.append(f"{name} = {text}")
        return lines

    def finish(self, lines: list[str], kernels: Sequence[str]) -> StrippedText:
        if not lines or not lines[-1].startswith("return "):
            raise Refusal("output code has no return at its end")
        called = [name for name in self.parameters if name not in self.weights]
        out = [f"{name} = {path}" for name, path in sorted(self.header.items())]
        out += [f"{name} = {self.constants[name]}" for name in sorted(self.constants) if name in self.locals]
        if self.prepared:
            out += ["", "", f"def prepare({', '.join(n for n in self.parameters if n in self.weights)}):"]
            out += [f"    {name} = {view}" for view, name in self.prepared.items()]
            names = ", ".join(f'"{name}": {name}' for name in self.prepared.values())
            out += [f"    return {{{names}}}"]
        out += ["", "", f"def call({', '.join(called)}):", *(f"    {line}" for line in lines)]
        return StrippedText(
            "\n".join(out).strip("\n") + "\n",
            tuple(name for name in kernels if name in self.used_kernels),
            tuple(sorted(self.namespaces - words.NATIVE_NAMESPACES)),
            self.returns,
        )

    # ------------------------------------------------------------------------------------------------- statements

    def _statement(self, statement: ast.stmt) -> Iterator[str]:
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                self._take_arguments([n.id for n in names if isinstance(n, ast.Name)])
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield from self._assignment(name, value)
            case ast.Expr(value=ast.Call(func=func) as call):
                if ast.unparse(func) != "args.clear" and not self._is_dropped(func):
                    yield self._expression(call)
            case ast.Delete(targets=targets):
                names = [t.id for t in targets if isinstance(t, ast.Name)]
                if len(names) != len(targets):
                    raise Refusal(f"unknown deletion: `{ast.unparse(statement)}`")
                kept = [n for n in names if n in self.locals and n not in self.renamed]
                self.locals.difference_update(kept)
                if kept:
                    yield f"del {', '.join(self.own_names.get(n, n) for n in kept)}"
            case ast.Return(value=ast.Tuple(elts=items)):
                self.returns = tuple(self._expression(item) for item in items)
                yield f"return ({', '.join(self.returns)}{',' if len(items) == 1 else ''})"
            case _:
                raise Refusal(f"unknown statement: `{ast.unparse(statement)[:120]}`")

    def _take_arguments(self, names: Sequence[str]) -> None:
        if len(names) != len(self.parameters):
            raise Refusal(f"output code takes {len(names)} inputs where the piece has {len(self.parameters)}")
        self.renamed.update(zip(names, self.parameters, strict=True))

    def _assignment(self, name: str, value: ast.expr) -> Iterator[str]:
        if isinstance(value, ast.Name) and value.id in self.renamed and value.id not in self.locals:
            self.renamed[name] = self.renamed[value.id]  # `s95 = arg0_1`: the symbol is the parameter
            return
        text = self._expression(value)
        if name in self.renamed:
            if text != f"{words.ALIGN}({self.renamed[name]})":
                raise Refusal(f"output code assigns to its input `{name}`")
            if self.renamed[name] in self.weights:
                self.prepared[text] = self.renamed[name]
            else:
                yield f"{self.renamed[name]} = {text}"
            return
        self.locals.add(name)
        if name in self.parameters or _PREPARED.fullmatch(name):
            self.own_names[name] = f"{name}_"  # the compiler's own `s1` is not the piece's
        yield f"{self.own_names.get(name, name)} = {text}"

    def _is_dropped(self, func: ast.expr) -> bool:
        if isinstance(func, ast.Name):
            return func.id in words.DROPPED
        return ast.unparse(func) == "torch.cuda.set_device"

    # ------------------------------------------------------------------------------------------------ expressions

    def _expression(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return self._name(name)
            case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
                return repr(value) if not isinstance(value, float) or value == value else 'float("nan")'
            case ast.Tuple(elts=items):
                inner = ", ".join(map(self._expression, items))
                return f"({inner},)" if len(items) == 1 else f"({inner})"
            case ast.List(elts=items):
                return f"[{', '.join(map(self._expression, items))}]"
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return repr(-value)
            case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
                return f"{'-' if isinstance(node.op, ast.USub) else 'not '}({self._expression(operand)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return f"{self._operand(left)} {_OPERATORS[type(op)]} {self._operand(right)}"
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return f"{self._operand(left)} {_COMPARISONS[type(op)]} {self._operand(right)}"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self._expression(body)} if {self._expression(test)} else {self._expression(orelse)})"
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(index))):
                return f"{self._name(name)}[{index}]"
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
        raise Refusal(f"unknown expression: `{ast.unparse(node)[:120]}`")

    def _operand(self, node: ast.expr) -> str:
        text = self._expression(node)
        return f"({text})" if isinstance(node, ast.BinOp | ast.Compare | ast.UnaryOp) else text

    def _name(self, name: str) -> str:
        if name in self.renamed:
            return self.renamed[name]
        if name in self.locals:
            return self.own_names.get(name, name)
        if name in self.constants:
            self.locals.add(name)
            self.header["torch"] = "torch"
            return name
        if name in words.CONSTANT_NAMES:
            return f'float("{name}")'
        raise Refusal(f"unknown name: `{name}`")

    def _attribute(self, node: ast.Attribute) -> str:
        path = ast.unparse(node)
        root, _, name = path.rpartition(".")
        if root == "torch" and name in words.DTYPES:
            return self._global(f"{name}_" if name == "bool" else name, path)
        if path in ("torch.strided", "torch.contiguous_format", "torch.preserve_format", "torch.channels_last"):
            return self._global(name, path)
        raise Refusal(f"unknown attribute: `{path}`")

    def _global(self, name: str, path: str) -> str:
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
        arguments = [self._expression(a) for a in node.args]
        if head in self.kernels:  # a Triton kernel's stream is passed by name; ours takes it last
            arguments += [self._expression(k.value) for k in keywords]
        else:
            arguments += [f"{k.arg}={self._expression(k.value)}" for k in keywords]
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
            return self._global(path, words.FUNCTIONS[path])
        if path in words.SCALAR_FUNCTIONS:
            return path
        if root == "math" and name in words.MATH_FUNCTIONS:
            return self._global(f"math_{name}", path)
        if root == "extern_kernels" and name in words.EXTERN:
            return self._global(name, words.EXTERN[name])
        if path in ("device", "torch.device"):
            return "torch.device"
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and name in words.TENSOR_METHODS:
            return f"{self._name(func.value.id)}.{name}"
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
        return self._global("_".join(parts), path)

    def _device(self, node: ast.Call) -> str:
        values = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
        kind = next((v for v in values if isinstance(v, str)), None)
        if kind not in ("cpu", "cuda"):
            raise Refusal(f"unknown device: `{ast.unparse(node)}`")
        return self._global(f"{kind}_device", f'torch.device("{kind}")')


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
_OPERATOR_ALIASES = (("aten.", "torch.ops.aten."), ("inductor_ops.", "torch.ops.inductor."), ("_quantized.", "torch.ops._quantized."))


def _is_default(head: str, keyword: ast.keyword) -> bool:
    """Tell whether `alpha=1` or `beta=1` says what the function does anyway."""
    return (
        head in ("addmm", "baddbmm")
        and keyword.arg in ("alpha", "beta")
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value == 1
    )


def _flatten(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in order, those under a device guard included: one program stays on one device."""
    for statement in statements:
        if isinstance(statement, ast.With):
            guards = [ast.unparse(item.context_expr.func) for item in statement.items if isinstance(item.context_expr, ast.Call)]
            if guards != ["torch.cuda._DeviceGuard"]:
                raise Refusal(f"unknown block: `{ast.unparse(statement)[:80]}`")
            yield from _flatten(statement.body)
        else:
            yield statement
