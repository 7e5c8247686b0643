"""Free the compiler's output code of its compile machinery.

In: the module that Inductor wrote (kernel sources, asynchronous compilation, benchmark, asserts, boxed arguments).
Out: a short text with `prepare(w0, …)`, run once per site, and `call(s0, …, x0, …)`, run on every step; kernels,
weights and prepared views are globals. The module is read by `ast` against a closed grammar: what is not
known is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from piecework.seam import vocabulary as words
from piecework.seam.output_text import ExpressionWriter
from piecework.seam.vocabulary import Refusal
from piecework.values.syntax import parse_python


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

    `parameters` name the graph's inputs in order, `weights` those that are bound once; `constants` give the tensors
    which the graph holds itself, as expressions; `aligned` those inputs that kernels take for aligned, and whether they
    are written to (a copy would then be wrong, so that a misaligned one is an error).
    """
    module = parse_python(source)
    kernels, call = _scan_module(module)
    body = _Body(ExpressionWriter(parameters, frozenset(weights), frozenset(kernels), dict(constants or {})))
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


class _Body:
    """Rewrite the statements of `call`."""

    def __init__(self, writer: ExpressionWriter) -> None:
        self.writer = writer
        self.returns: tuple[str, ...] = ()

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
            text = f"{self.writer.global_name(word, words.FUNCTIONS[word])}({name})"
            if name in self.writer.weights:
                self.writer.prepared[text] = name
            else:
                lines.append(f"{name} = {text}")
        return lines

    def finish(self, lines: list[str], kernels: Sequence[str]) -> StrippedText:
        if not lines or not lines[-1].startswith("return "):
            raise Refusal("output code has no return at its end")
        writer = self.writer
        called = [name for name in writer.parameters if name not in writer.weights]
        out = [f"{name} = {path}" for name, path in sorted(writer.header.items()) if name != path]
        out += [f"{name} = {text}" for name, text in sorted(writer.constants.items()) if name in writer.used_constants]
        if writer.prepared:
            out += ["", "", f"def prepare({', '.join(n for n in writer.parameters if n in writer.weights)}):"]
            out += [f"    {name} = {view}" for view, name in writer.prepared.items()]
            names = ", ".join(f'"{name}": {name}' for name in writer.prepared.values())
            out += [f"    return {{{names}}}"]
        out += ["", "", f"def call({', '.join(called)}):", *(f"    {line}" for line in lines)]
        return StrippedText(
            "\n".join(out).strip("\n") + "\n",
            tuple(name for name in kernels if name in writer.used_kernels),
            tuple(sorted(writer.namespaces - words.NATIVE_NAMESPACES)),
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
                    yield self.writer.expression(call)
            case ast.Delete(targets=targets):
                deleted = [t.id for t in targets if isinstance(t, ast.Name)]
                if len(deleted) != len(targets):
                    raise Refusal(f"unknown deletion: `{ast.unparse(statement)}`")
                kept = [n for n in deleted if n in self.writer.locals and n not in self.writer.renamed]
                self.writer.locals.difference_update(kept)
                if kept:
                    yield f"del {', '.join(self.writer.own_names.get(n, n) for n in kept)}"
            case ast.Return(value=ast.Tuple(elts=items)):
                self.returns = tuple(self.writer.expression(item) for item in items)
                yield f"return ({', '.join(self.returns)}{',' if len(items) == 1 else ''})"
            case _:
                raise Refusal(f"unknown statement: `{ast.unparse(statement)[:120]}`")

    def _take_arguments(self, names: Sequence[str]) -> None:
        if len(names) != len(self.writer.parameters):
            raise Refusal(f"output code takes {len(names)} inputs where the piece has {len(self.writer.parameters)}")
        self.writer.renamed.update(zip(names, self.writer.parameters, strict=True))

    def _assignment(self, name: str, value: ast.expr) -> Iterator[str]:
        if isinstance(value, ast.Name) and value.id in self.writer.renamed and value.id not in self.writer.locals:
            self.writer.renamed[name] = self.writer.renamed[value.id]  # `s95 = arg0_1`: the symbol is the parameter
            return
        text = self.writer.expression(value)
        if name in self.writer.renamed:
            if text != f"{words.ALIGN}({self.writer.renamed[name]})":
                raise Refusal(f"output code assigns to its input `{name}`")
            if self.writer.renamed[name] in self.writer.weights:
                self.writer.prepared[text] = self.writer.renamed[name]
            else:
                yield f"{self.writer.renamed[name]} = {text}"
            return
        self.writer.locals.add(name)
        if name in self.writer.parameters or _PREPARED.fullmatch(name):
            self.writer.own_names[name] = f"{name}_"  # the compiler's own `s1` is not the piece's
        yield f"{self.writer.own_names.get(name, name)} = {text}"

    def _is_dropped(self, func: ast.expr) -> bool:
        if isinstance(func, ast.Name):
            return func.id in words.DROPPED
        return ast.unparse(func) == "torch.cuda.set_device"


def _flatten(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in order, those under a device guard included: one program stays on one device."""
    for statement in statements:
        if isinstance(statement, ast.With):
            guards = [ast.unparse(item.context_expr).partition("(")[0] for item in statement.items]
            if guards != ["torch.cuda._DeviceGuard"]:
                raise Refusal(f"unknown block: `{ast.unparse(statement)[:80]}`")
            yield from _flatten(statement.body)
        else:
            yield statement
