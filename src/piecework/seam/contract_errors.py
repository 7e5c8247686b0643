"""What is said of an operator that does not keep its contract: operator, argument or result, and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.errors import ContractError


def broken(name: str, argument: str, what: str, hint: str) -> ContractError:
    """Return the error of an operator that does what was not promised of it."""
    return ContractError(f"operator `{name}` {what}", hint=hint, facts={"operator": name, "argument": argument})


def undeclared_write(name: str, argument: str) -> ContractError:
    """Return the error of an operator that writes what it does not declare."""
    return broken(
        name, argument, f"writes its argument `{argument}`, which its schema does not say",
        f"mark it in the schema, as in `Tensor(a!) {argument}`, or write to a copy",
    )  # fmt: skip


def wrong(name: str, what: str, kind: str, fake: Any, got: Any) -> ContractError:
    """Return the error of a result that is not what the operator's fake says."""
    error = broken(
        name, what, f"gives a {what} of {kind} `{got}`, where its fake says `{fake}`",
        "let the function registered with `register_fake` describe what the body returns",
    )  # fmt: skip
    error.facts |= {"fake": fake, "got": got}
    return error


def wrong_count(name: str, got: int, expected: int) -> ContractError:
    """Return the error of an operator that gives another number of results than its fake."""
    return broken(
        name, "result", f"gives `{got}` results, where its fake says `{expected}`",
        "let the function registered with `register_fake` return as many results as the body",
    )  # fmt: skip


def at_sizes(error: ContractError, sizes: Mapping[str, int]) -> ContractError:
    """Return the error with the sizes at which it was found."""
    if not sizes or "sizes" in error.facts:
        return error
    where = ", ".join(f"`{name}={size}`" for name, size in sizes.items())
    return ContractError(f"{error.message}, at {where}", hint=error.hint, facts={**error.facts, "sizes": dict(sizes)})
