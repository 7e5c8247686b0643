"""What can be observed of an engine's tiers, as the events of `piecework.events`."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.events import Event


@dataclass(frozen=True, kw_only=True)
class TierReady(Event):
    """A tier serves from now on: 0 eager, 1 compiled, 2 captured; `num_steps` ran before it."""

    tier: int
    detail: str = ""
    num_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class TierFailed(Event):
    """A tier cannot serve, or can no more; the one below it goes on."""

    tier: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class CompileProcess(Event):
    """The process that compiles beside the server began (`started`), ended (`done`), or was lost (`lost`)."""

    what: str
    pid: int
    detail: str = ""
