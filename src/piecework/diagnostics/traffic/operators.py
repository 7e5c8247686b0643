"""An operator as a program of its own: one of the registry's, or a function `module:name`, at shapes that are given."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from piecework.api.programs import make_request
from piecework.diagnostics.explain import NamedOnly
from piecework.errors import OptionError
from piecework.events import ignore
from piecework.ops.operators import operators
from piecework.options import CompileOptions
from piecework.pipeline import build
from piecework.store.memory import MemoryStore
from piecework.values.record import Record

TOKENS = "T"
_EPSILON = 1e-6
_TRACED = 3
_WEIGHTS = ("weight", "bias")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class OperatorCall:
    """What an operator is called with: shapes of its tensors, `T` for the token count, and values of the others."""

    hidden: int = 4096
    dtype: str = "bfloat16"
    device: str = "cpu"
    shapes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def reference_of(name: str) -> Callable[..., Any] | None:
    """Return what an operator of the registry is made of, whichever implementation a graph calls; None for others."""
    space, _, form = name.partition("::")
    form = form.partition("__")[0]
    known = operators.of_form(form) if space == "piecework" else None
    return None if known is None or known.is_opaque else known.form(form).reference


def is_operator(name: str) -> bool:
    """Tell whether a name is an operator's and no model's: one of the registry's forms, or `module:function`."""
    return name in _forms() or _FUNCTION.fullmatch(name) is not None


class OperatorModule(torch.nn.Module):
    """Calls an operator: activations are given, weights are its own."""

    def __init__(
        self,
        function: Callable[..., Any],
        weights: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        token_dims: Mapping[str, int],
    ) -> None:
        super().__init__()
        self.token_dims = dict(token_dims)
        self.function = function
        self.values = dict(values)
        self.names = tuple(weights)
        for name, weight in weights.items():
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, given: dict[str, torch.Tensor]) -> Any:
        """Call the operator by its arguments' names."""
        own = {name: getattr(self, name) for name in self.names}
        return self.function(**given, **own, **self.values)


def operator_at(name: str, call: OperatorCall, tokens: int) -> tuple[OperatorModule, dict[str, torch.Tensor]]:
    """Return an operator as a module, and its activations at a token count.

    Tensors:
        ->  [T, ..] each  any  of the shapes that were asked for
    """
    function, signature = _find(name)
    tensors, values = _arguments(name, signature, call)
    weights = {each: _tensor(shape, call, tokens) for each, shape in tensors.items() if TOKENS not in shape}
    given = {each: _tensor(shape, call, tokens) for each, shape in tensors.items() if TOKENS in shape}
    return OperatorModule(function, weights, values, {each: tensors[each].index(TOKENS) for each in given}), given


def operator_program(name: str, call: OperatorCall) -> tuple[Record, tuple[str, ...]]:
    """Trace an operator; return the record, whose token count is `tokens`, and the texts of its pieces."""
    module, given = operator_at(name, call, _TRACED)
    dynamic = {"given": {each: {dim: "tokens"} for each, dim in module.token_dims.items()}}
    known = operators.of_form(name)
    kept = ("none", f"+{known.name}") if known is not None else ("none",)  # as one call, so that it can be told apart
    options = CompileOptions(max_num_batched_tokens=1 << 20, ranges=((1, 1 << 20),), custom_ops=kept).resolve()
    request = make_request(module, (given,), dynamic, options)
    store = MemoryStore()
    named = NamedOnly(request.compiler)
    _, record = build(replace(request, compiler=named), store, ignore)
    return record, tuple(store.read_blob(piece.text).decode() for piece in record.pieces)


def _find(name: str) -> tuple[Callable[..., Any], inspect.Signature]:
    known = operators.of_form(name)
    if known is not None and not known.is_opaque:
        return getattr(torch.ops.piecework, name), inspect.signature(known.form(name).reference)
    module, _, path = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), path)
        return function, inspect.signature(function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise OptionError(
            f"there is no operator `{name}`: {error}",
            hint=f"operators are {', '.join(_forms())}, or a function as `module:function`",
        ) from error


def _forms() -> list[str]:
    return [form.name for each in operators.values() if not each.is_opaque for form in each.forms]


def _arguments(
    name: str, signature: inspect.Signature, call: OperatorCall
) -> tuple[dict[str, tuple[int | str, ...]], dict[str, Any]]:
    for given in (*call.shapes, *call.values):
        if given not in signature.parameters:
            raise OptionError(
                f"`{name}` has no argument `{given}`", hint=f"its arguments are {', '.join(signature.parameters)}"
            )
    tensors: dict[str, tuple[int | str, ...]] = {}
    values: dict[str, Any] = {}
    for each, parameter in signature.parameters.items():
        if each in call.shapes:
            tensors[each] = call.shapes[each]
        elif each in call.values:
            values[each] = call.values[each]
        elif parameter.default is not inspect.Parameter.empty:
            continue
        elif "Tensor" in str(parameter.annotation) or parameter.annotation is inspect.Parameter.empty:
            tensors[each] = (call.hidden,) if each in _WEIGHTS else (TOKENS, call.hidden)
        elif each in ("epsilon", "eps"):
            values[each] = _EPSILON
        else:
            raise OptionError(
                f"`{name}` needs a value for `{each}` (`{parameter.annotation}`)", hint=f"give `--value {each}=…`"
            )
    if all(TOKENS not in shape for shape in tensors.values()):
        raise OptionError(f"no argument of `{name}` has the token count `{TOKENS}` in its shape", hint="give `--shape`")
    return tensors, values


def _tensor(shape: Sequence[int | str], call: OperatorCall, tokens: int) -> torch.Tensor:
    sizes = [tokens if size == TOKENS else int(size) for size in shape]
    return torch.zeros(sizes, dtype=getattr(torch, call.dtype), device=call.device)


def read_shape(text: str) -> tuple[str, tuple[int | str, ...]]:
    """Read `name=T,32,128`."""
    name, _, sizes = text.partition("=")
    try:
        shape = tuple(TOKENS if size.strip() == TOKENS else int(size) for size in sizes.split(","))
        if not name or any(size != TOKENS and int(size) < 1 for size in shape):
            raise ValueError(text)
    except ValueError as error:
        raise OptionError(f"`{text}` is no shape", hint="write it as `name=T,32,128`, T for the tokens") from error
    return name, shape


def read_value(text: str) -> tuple[str, Any]:
    """Read `name=1e-5`."""
    name, equals, value = text.partition("=")
    try:
        return name, ast.literal_eval(value) if equals else _refuse(text)
    except (ValueError, SyntaxError) as error:
        raise OptionError(f"`{text}` is no value", hint="write it as `name=1e-5`, a Python literal") from error


def _refuse(text: str) -> Any:
    raise ValueError(text)
