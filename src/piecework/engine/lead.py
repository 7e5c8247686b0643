"""Rank 0 of an engine that several ranks share: each step it runs, the others are told of, and run with it.

Scheduling, sampling and the choice of a tier are rank 0's alone. What is shared is a step function: calling a `LedStep`
sends what the step is made of, and runs this rank's part. So whatever calls step functions (tiers, trials beside eager,
rehearsals) is shared as it is, and a tier is swapped in on all ranks at the same step.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from torch import Tensor

from piecework.engine.generate import StepFunction
from piecework.engine.packed import pack_step
from piecework.errors import ParallelError
from piecework.ops.step import running_step
from piecework.parallel.agree import error_from
from piecework.parallel.channel import Channel
from piecework.parallel.ranks import telling_of_loss
from piecework.parallel.transfer import fingerprint, pack
from piecework.runtime.idle import capture_within
from piecework.runtime.program import Program
from piecework.seam.groups import standing_in
from piecework.store.protocol import KernelStore
from piecework.values.placement import group_name
from piecework.values.record import Record

BEAT, STEP, FELL, BIND, PROGRAM, CAPTURE, RESULT, END = range(8)  # kinds of messages
EAGER, BOUND = 0, 1  # functions that are there from the start; those that come later count on
GRACE_S = 8.0  # between ranks that fail in one step, and for a goodbye
MOST_BEAT_S = 2.0
_LOOK_S = 0.01
Bind = Callable[[str, Record], Program]
StepOf = Callable[[Any], StepFunction]


class Lead:
    """Tells the other ranks what to do, in the order in which rank 0 does it."""

    def __init__(self, channel: Channel, *, asked_to_end: Callable[[], None] = lambda: None) -> None:
        self.channel = channel
        self.beat_s = min(MOST_BEAT_S, channel.timeout_s / 4)
        self.asked_to_end = asked_to_end
        self.num_steps = 0
        self._functions: dict[int, int] = {}  # by the identity of what runs: it is kept below
        self._kept: list[Any] = []
        self._numbers = itertools.count(BOUND + 1)
        self._told_at = time.monotonic()
        self._is_over = False

    def step(self, function: int, own: StepFunction) -> LedStep:
        """Return a step function that all ranks run together; `function` is what the others know it by."""
        return LedStep(self, function, own)

    def eager(self, own: StepFunction) -> LedStep:
        """Return the shared step function of tier 0."""
        return self.step(EAGER, own)

    def apart(self) -> AbstractContextManager[None]:
        """Let this rank run what holds collectives by itself, until the block ends."""
        ranks = self.channel.placement.ranks
        return standing_in(group_name(ranks), ranks)

    def know(self, what: Any, function: int) -> None:
        """Note under which number the other ranks know a program."""
        self._kept.append(what)
        self._functions[id(what)] = function

    def steps_of(self, step_of: StepOf) -> StepOf:
        """Return what makes a shared step function of a program that the other ranks have too."""
        return lambda what: self.step(self._functions[id(what)], step_of(what))

    def binding(self, bind: Bind, store: KernelStore) -> Bind:
        """Return what binds a program on all ranks; those that lack it are sent it. Steps may go on meanwhile."""

        def bind_all(key: str, record: Record) -> Program:
            function = next(self._numbers)
            self._tell(BIND, {"function": function, "key": key, "fingerprint": fingerprint(key, store)})
            program = bind(key, record)
            lacking = [rank for rank, said in self._replies(f"bind {function}").items() if said == "lacks"]
            if lacking:
                self._tell(PROGRAM, {"function": function, "key": key}, pack(key, store))
                self._replies(f"stored {function}", lacking)
            self.know(program, function)
            return program

        return bind_all

    def capturing(self, captured: Any, program: Any) -> LedCapture:
        """Return a captured program whose sizes are captured on all ranks in one order."""
        function = next(self._numbers)
        self.capture(self._functions[id(program)], function, "", 0)  # it may serve before any size is captured
        led = LedCapture(self, captured, self._functions[id(program)], function)
        self.know(led, function)
        return led

    def capture(self, source: int, function: int, phase: str, size: int) -> None:
        """Have the other ranks capture a size of a program, while this one does."""
        self._tell(CAPTURE, {"source": source, "function": function, "phase": phase, "size": size})

    def beat(self) -> None:
        """Tell the other ranks that this one is there, if they have heard nothing for a while."""
        if time.monotonic() - self._told_at < self.beat_s:
            return
        self._send(BEAT)
        if any(self.channel.posted("end", rank) is not None for rank in self.channel.others):
            self.asked_to_end()

    def give(self, result: Any) -> None:
        """End the others' following with a result of plain data."""
        self._send(RESULT, json.dumps(result).encode())

    def close(self, failure: Exception | None = None) -> None:
        """Say goodbye. Raises ParallelError where a rank is gone already; after a failure nobody is waited for."""
        if self._is_over:
            return
        self._is_over = True
        if failure is None:
            self._send(END)
            self.channel.meet(GRACE_S)
            return
        if isinstance(failure, ParallelError):  # who knows whether they listen: they find the connection closed
            return
        with suppress(ParallelError):
            self._send(END, str(getattr(failure, "exit_code", 1)).encode())

    def send_step(self, function: int, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> None:
        """Send the step that is running.

        Tensors:
            input_ids     [1, T]  i64
            position_ids  [1, T]  i64
            rows          [N]     i64
        """
        step = running_step()
        assert step is not None
        self.num_steps += 1
        self._send(STEP, pack_step(function, input_ids, position_ids, rows, step))

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let a failure of the step pass where it was every rank's, at one place: they are in step still."""
        try:
            with telling_of_loss(self.channel.placement):
                yield
        except ParallelError:
            raise
        except Exception as error:
            name, until = f"failed {self.num_steps}", time.monotonic() + GRACE_S
            while not self.channel.have_posted(name, self.channel.others):
                if time.monotonic() > until:
                    raise ParallelError(
                        f"a step failed on rank 0 and not on all others: {type(error).__name__}: {error}",
                        hint="the ranks can go on no more; all are started together again",
                        facts={"step": self.num_steps},
                    ) from error
                time.sleep(_LOOK_S)
            self._send(FELL)
            raise

    def _send(self, kind: int, body: bytes = b"") -> None:
        self.channel.send(kind, body)
        self._told_at = time.monotonic()

    def _tell(self, kind: int, what: Mapping[str, Any], data: bytes = b"") -> None:
        line = json.dumps(what).encode()
        self._send(kind, len(line).to_bytes(8, "little") + line + data)

    def _replies(self, name: str, ranks: list[int] | None = None) -> dict[int, str]:
        """Wait for what the others say to something; raise what one of them failed with."""
        until, found = time.monotonic() + self.channel.timeout_s, {}
        for rank in self.channel.others if ranks is None else ranks:
            while (said := self.channel.posted(name, rank)) is None:
                if self._is_over or time.monotonic() > until:
                    raise ParallelError(f"rank {rank} did not answer (`{name}`)", hint="see what that rank does")
                time.sleep(_LOOK_S)
            if said.startswith("{"):
                raise error_from(json.loads(said), rank, "binding the program")
            found[rank] = said
        return found


class LedStep:
    """A step function that all ranks run at once."""

    def __init__(self, lead: Lead, function: int, own: StepFunction) -> None:
        self._lead, self._function, self._own = lead, function, own

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        """Run this rank's part of the step, and have the others run theirs.

        Tensors:
            input_ids     [1, T]  i64
            position_ids  [1, T]  i64
            rows          [N]     i64
            ->            [...]   model
        """
        self._lead.send_step(self._function, input_ids, position_ids, rows)
        with self._lead.failing_together():
            return self._own(input_ids, position_ids, rows)


class LedCapture:
    """Captures sizes on all ranks in the order that rank 0 finds time for."""

    def __init__(self, lead: Lead, captured: Any, source: int, function: int) -> None:
        self._lead, self._captured, self._numbers = lead, captured, (source, function)

    def __call__(self, **inputs: Any) -> Any:
        """Run this rank's captured program."""
        return self._captured(**inputs)

    @property
    def pending(self) -> tuple[tuple[str, int], ...]:
        """The sizes that are left."""
        return self._captured.pending  # type: ignore[no-any-return]

    def capture(self, phase: str, size: int) -> None:
        """Capture a size here and on the others."""
        self._lead.capture(*self._numbers, phase, size)
        self._captured.capture(phase, size)

    def note_failure(self, phase: str, size: int, error: Any) -> None:
        """Leave a size to what runs without graphs."""
        self._captured.note_failure(phase, size, error)

    def capture_some(self, budget_ms: float) -> tuple[tuple[str, int], ...]:
        """Capture as many sizes as a budget of time allows."""
        return capture_within(self, budget_ms)
