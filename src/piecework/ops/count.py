"""How many rows of a padded step are real: what an opaque body asks where no step holds the answer."""

from __future__ import annotations

from contextvars import ContextVar

COUNT: ContextVar[int] = ContextVar("piecework_num_tokens", default=-1)


def true_count(num_rows: int) -> int:
    """Return the number of real rows of the running step, of which a body sees `num_rows` with the padding.

    Outside a padded replay all rows are real.
    """
    count = COUNT.get()
    return num_rows if count < 0 else count
