"""What can be observed of several ranks: typed events, as those of `piecework.events`."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.events import Event


@dataclass(frozen=True, kw_only=True)
class RanksAgreed(Event):
    """All ranks start from one program: `is_hit` says that rank `owner` had it, else it was built there.

    `had` says of each rank whether its store held the program whole before it was sent.
    """

    rank: int
    ranks: int
    key: str
    owner: int
    is_hit: bool
    had: tuple[bool, ...]
