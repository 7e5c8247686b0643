"""Things looked at one after another: whether each works, what was found, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WORKS, FAILS, UNTESTED, ABSENT = "works", "fails", "untested", "absent"
_SIGNS = {WORKS: "ok", FAILS: "NO", UNTESTED: "??", ABSENT: "--"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: whether it works, what was found, and the reason where it does not."""

    what: str
    state: str
    found: str
    reason: str = ""


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Lay out findings for people."""
    lines = []
    for each in findings:
        lines.append(f"{_SIGNS[each.state]}  {each.what}: {each.found}")
        lines += [f"      {each.reason}"] if each.reason else []
    return lines
