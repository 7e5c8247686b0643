"""What a command writes: its answer on standard output, all else on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_error(message: str, hint: str) -> None:
    """Tell of a failure on standard error."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def error_document(kind: str, message: str, hint: str, facts: Mapping[str, Any], code: int) -> dict[str, Any]:
    """Return what `--json` prints in place of an answer."""
    return {
        "error": {"class": kind, "message": message, "hint": hint, "facts": _plain(facts)},
        "exit_code": code,
    }


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: json.loads(json.dumps(value, default=str)) for name, value in facts.items()}


def start_logging(handler: logging.Handler | None = None) -> None:
    """Send the package's log to standard error, through `handler` where a progress bar is drawn there."""
    log = logging.getLogger("piecework")
    chosen = handler or logging.StreamHandler(sys.stderr)
    chosen.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.handlers[:] = [chosen]
    log.setLevel(logging.INFO)
    log.propagate = False


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """Leave the package's log as it was before a command set it up: another may run in this process."""
    log = logging.getLogger("piecework")
    before = list(log.handlers), log.level, log.propagate
    try:
        yield
    finally:
        log.handlers[:], log.propagate = before[0], before[2]
        log.setLevel(before[1])


def size_text(size_bytes: int) -> str:
    """Write a number of bytes for people."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def table(rows: list[list[str]], head: list[str]) -> str:
    """Lay out rows under a head, columns as wide as they need."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def date_text(moment_s: float) -> str:
    """Write a moment, in seconds since 1970, as its date and time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment_s))
