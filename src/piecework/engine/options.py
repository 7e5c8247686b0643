"""How an engine serves: frozen and validated when made; torch-free, and nothing here enters a key."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from piecework.choices import by_name, number, one_of, truth, whole
from piecework.errors import OptionError

NOW, COMPILED, CAPTURED = "now", "compiled", "captured"
AUTO, ON, OFF = "auto", "on", "off"
BYTES = "bytes"
WAITS = (NOW, COMPILED, CAPTURED)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"keyed": False, "text": text})


@by_name
@dataclass(frozen=True)
class EngineOptions:
    """What an engine may use, and what it waits for before it answers."""

    max_num_sequences: int = _option(64, "answers that are under way at a time; others wait")
    max_num_batched_tokens: int = _option(2048, "tokens of a step; longer prompts go in chunks")
    max_length: int = _option(0, "longest prompt with its answer; 0 = as long as model and pages allow")
    page_size: int = _option(16, "tokens of a page of the cache")
    num_pages: int = _option(0, "pages of the cache; 0 = what the memory allows")
    memory_fraction: float = _option(0.0, "share of the device's memory to use; 0 = 0.9 of a GPU, 2 GiB of RAM")
    share_prefixes: bool = _option(True, "share the pages of equal beginnings")
    enforce_eager: bool = _option(False, "serve eager code alone: nothing is compiled or captured")
    wait_for: str = _option(NOW, "now, compiled or captured: what is there before the first answer")
    compile_nice: int = _option(19, "how far the compile process stands back for everything else, 0 to 19")
    step_ahead: str = _option(AUTO, "launch a step before the last one's tokens are read: auto (on a GPU), on or off")
    idle_ms: float = _option(50.0, "time that work in gaps between steps may take at a time")
    rank_timeout_s: float = _option(300.0, "silence after which a rank takes the others for gone")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_num_sequences", 1, 1 << 16), ("max_num_batched_tokens", 2, 1 << 22), ("max_length", 0, 1 << 24),
            ("page_size", 1, 1 << 12), ("num_pages", 0, 1 << 31), ("compile_nice", 0, 19),
        ):  # fmt: skip
            whole(name, getattr(self, name), low, high)
        for name, least, most in (
            ("memory_fraction", 0, 1.0), ("idle_ms", 0, 60_000.0), ("rank_timeout_s", 1, 86_400.0),
        ):  # fmt: skip
            number(name, getattr(self, name), least, most)
        for name in (each.name for each in fields(self) if isinstance(each.default, bool)):
            truth(name, getattr(self, name))
        if self.max_num_sequences >= self.max_num_batched_tokens:
            raise OptionError(
                f"`max_num_sequences={self.max_num_sequences}` is not below "
                f"`max_num_batched_tokens={self.max_num_batched_tokens}`",
                hint="a step holds one token of every sequence, and some of a prompt that comes in",
            )
        one_of("wait_for", self.wait_for, WAITS)
        one_of("step_ahead", self.step_ahead, (AUTO, ON, OFF))
        if self.enforce_eager and self.wait_for != NOW:
            raise OptionError(
                f"`wait_for={self.wait_for}` has no meaning beside `enforce_eager`", hint="leave one of the two out"
            )


@dataclass(frozen=True)
class Progress:
    """How far one phase is: `loading 62 %` of the bytes of weights, `compiling 2/3`, `capturing 12/35`."""

    phase: str
    done: int
    total: int
    detail: str = ""
    unit: str = ""

    @property
    def is_done(self) -> bool:
        return self.done >= self.total

    def __str__(self) -> str:
        if not self.total:
            return self.phase
        if self.unit == BYTES:
            return f"{self.phase} {100 * self.done // self.total} %"
        return f"{self.phase} {self.done}/{self.total}"


@dataclass(frozen=True)
class Status:
    """Where an engine stands, for readiness and metrics.

    `is_ready` says that requests are answered; `phase` is what goes on beside it or before it, with its progress.
    `tier` is the best one that serves: 0 eager, 1 compiled, 2 captured. `trouble` says which tier failed, and why.
    """

    is_ready: bool
    progress: Progress
    tier: int = 0
    trouble: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_preempted: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    steps_by_tier: tuple[int, ...] = (0, 0, 0)
    tokens_by_tier: tuple[int, ...] = (0, 0, 0)

    @property
    def phase(self) -> str:
        return self.progress.phase
