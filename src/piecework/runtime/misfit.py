"""A call that Python itself does not take: an argument too few, too many, or by a name that there is not."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecework.errors import InputError

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def refuse_call(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise InputError that names the argument where `call` does not take these; return where it takes them.

    A TypeError of a call is one of what ran inside it where its arguments fit.
    """
    takes = call.forward if isinstance(call, torch.nn.Module) else call
    try:
        signature = inspect.signature(takes)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise _misfit(signature, args, kwargs) from error


def _misfit(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputError:
    parameters = signature.parameters
    names = [name for name, one in parameters.items() if one.kind not in _STARS]
    places = [name for name, one in parameters.items() if one.kind in _BY_PLACE]
    takes = f"it takes {', '.join(f'`{name}`' for name in names)}"
    has_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if not has_more and (unknown := [name for name in kwargs if name not in names]):
        close = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"did you mean `{close[0]}`? {takes}" if close else takes
        return InputError(
            f"the program takes no argument `{unknown[0]}`", hint=hint, facts={"argument": unknown[0], "takes": names}
        )
    if len(args) > len(places) and not any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters.values()):
        return InputError(
            f"the call gives {len(args)} arguments by place, and the program takes {len(places)} so",
            hint=takes + ("" if places else " by name"), facts={"given": len(args), "takes": names},
        )  # fmt: skip
    if twice := [name for name in places[: len(args)] if name in kwargs]:
        return InputError(
            f"argument `{twice[0]}` is given twice, by place and by name",
            hint="give it once", facts={"argument": twice[0], "takes": names},
        )  # fmt: skip
    needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in kwargs and name not in places[: len(args)]]
    return InputError(
        f"argument `{missing[0]}` is missing" if missing else "the arguments do not fit the program",
        hint=f"give every input that the program was traced with: {takes}",
        facts={"argument": missing[0] if missing else "", "takes": names},
    )


_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
