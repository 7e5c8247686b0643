"""The registry: operators by name, the forms in which a graph calls them, and the implementations of each.

A form's reference is plain PyTorch. It is what the compiler sees where an operator is off, the body that runs where
it is on and nothing better is at hand, and the measure of every other implementation. A graph says which
implementation runs: each is an operator of its own to torch (`piecework::rms_norm__triton`), so that the choice stands
in a piece's text and in its key, and two programs of one process may choose differently.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from piecework.errors import OptionError
from piecework.ops.library import register

REFERENCE = "reference"
Body = Callable[..., Any]
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """One way to call an operator: its name to torch, its schema, and what it computes."""

    name: str
    schema: str
    reference: Body

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of its arguments, in order."""
        inner = self.schema[self.schema.index("(") + 1 : self.schema.index(") ->")]
        return tuple(part.strip().partition("=")[0].split()[-1] for part in inner.split(","))


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operator, for some devices.

    `irreplaceable` says why the compiler cannot write it itself: it then stays on even where operators are off, for
    the calls that it `serves`. `needs` names a package without which it is not at hand. `sources` and `source_module`
    are what else its result depends on.
    """

    name: str
    bodies: Mapping[str, Body]
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs: str = ""
    irreplaceable: str = ""
    serves: Callable[[Arguments], bool] = field(default=lambda arguments: True)
    sources: tuple[Body, ...] = ()
    source_module: str = ""

    def is_at_hand(self, device: str) -> bool:
        """Tell whether it runs on a device here."""
        return device in self.devices and (not self.needs or importlib.util.find_spec(self.needs) is not None)


@dataclass(frozen=True)
class Operator:
    """An operator: its forms, and its implementations, the one to prefer first.

    `made_of` names the operators that a fused one replaces. The body of an `is_opaque` one reads the step: no
    compiler sees into it, and graphs are cut at it.
    """

    name: str
    forms: tuple[Form, ...]
    implementations: tuple[Implementation, ...] = ()
    made_of: tuple[str, ...] = ()
    is_opaque: bool = False

    def form(self, name: str) -> Form:
        return next(form for form in self.forms if form.name == name)


class OperatorTable:
    """All operators of this process by name."""

    def __init__(self) -> None:
        self._operators: dict[str, Operator] = {}

    def add(self, operator: Operator) -> None:
        self._operators[operator.name] = operator

    def get(self, name: str) -> Operator | None:
        return self._operators.get(name)

    def of_form(self, form: str) -> Operator | None:
        """Return the operator that has a form of this name (`piecework::` apart)."""
        return next((one for one in self._operators.values() if any(f.name == form for f in one.forms)), None)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._operators))

    def values(self) -> tuple[Operator, ...]:
        return tuple(self._operators[name] for name in self.names())


operators = OperatorTable()


def define(name: str, forms: Mapping[str, Body], *, made_of: Sequence[str] = ()) -> Operator:
    """Register an operator by the schemas of its forms and their references."""
    made = []
    for schema, reference in forms.items():
        form = Form(schema.partition("(")[0], schema, reference)
        register(schema, _laid_out(reference), fake_of(reference))
        made.append(form)
    operator = Operator(name, tuple(made), made_of=tuple(made_of))
    operators.add(operator)
    return operator


def implement(
    operator: str,
    name: str,
    bodies: Mapping[str, Body],
    *,
    devices: Sequence[str] = ("cpu", "cuda"),
    needs: str = "",
    irreplaceable: str = "",
    serves: Callable[[Arguments], bool] | None = None,
    sources: Sequence[Body] = (),
    source_module: str = "",
    fakes: Mapping[str, Body] = MappingProxyType({}),
) -> Implementation:
    """Add an implementation of an operator, to be preferred to those that it has; `bodies` go by form.

    Results lie as the reference's do as an operator, unless `fakes` say otherwise.

    Raises OptionError for an operator or a form that there is not, and for a name that is taken.
    """
    known = operators.get(operator)
    if known is None:
        raise OptionError(f"there is no operator `{operator}`", hint=f"operators are {', '.join(operators.names())}")
    if name == REFERENCE or any(each.name == name for each in known.implementations):
        raise OptionError(f"operator `{operator}` has an implementation `{name}` already", hint="give it another name")
    for each in bodies:
        if all(form.name != each for form in known.forms):
            raise OptionError(
                f"operator `{operator}` has no form `{each}`",
                hint=f"its forms are {', '.join(form.name for form in known.forms)}",
            )
    made = Implementation(
        name,
        MappingProxyType(dict(bodies)),
        tuple(devices),
        needs,
        irreplaceable,
        serves or (lambda arguments: True),
        tuple(sources),
        source_module,
    )
    for each, body in bodies.items():
        form = known.form(each)
        fake = fakes.get(each) or fake_of(form.reference, body)
        register(f"{each}__{name}{form.schema[len(each) :]}", body, fake)
    operators.add(Operator(known.name, known.forms, (made, *known.implementations), known.made_of, known.is_opaque))
    return made


def fake_of(reference: Body, body: Body | None = None) -> Body:
    """Return a fake that describes what the reference gives, laid out as every implementation lays it out."""

    def fake(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _map(lambda result: _empty_as(result, first), reference(first, *args, **kwargs))

    fake.__module__ = (body or reference).__module__  # where a record looks for what registers the operator
    fake.__signature__ = inspect.signature(reference)  # type: ignore[attr-defined]
    return fake


def _laid_out(reference: Body) -> Body:
    """Return the reference as a body: results have the layout that the fake promises.

    A result of the first tensor's shape lies as `torch.empty_like` of it would, any other is contiguous.
    """

    def body(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _map(lambda result: _as_promised(result, first), reference(first, *args, **kwargs))

    body.__module__, body.__doc__ = reference.__module__, reference.__doc__
    return body


def _as_promised(result: Tensor, first: Tensor) -> Tensor:
    if result.is_contiguous() and (result.shape != first.shape or first.is_contiguous()):
        return result
    wanted = _empty_as(result, first)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


def _empty_as(result: Tensor, first: Tensor) -> Tensor:
    if result.shape == first.shape:
        return torch.empty_like(first, dtype=result.dtype)
    return result.new_empty(result.shape)


def _map(function: Callable[[Tensor], Tensor], results: Any) -> Any:
    return tuple(map(function, results)) if isinstance(results, tuple) else function(results)
