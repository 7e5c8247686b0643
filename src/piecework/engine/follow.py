"""A rank other than 0 of an engine that several ranks share: it runs what rank 0 sends, and decides nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from piecework.engine.generate import StepFunction
from piecework.engine.lead import BEAT, BIND, BOUND, CAPTURE, EAGER, END, FELL, GRACE_S, PROGRAM, RESULT, STEP
from piecework.engine.packed import UnpackedStep, unpack_step
from piecework.errors import ParallelError, StoreError
from piecework.ops import AttentionBackend, step_context
from piecework.parallel.agree import error_data
from piecework.parallel.channel import Channel
from piecework.parallel.ranks import telling_of_loss
from piecework.parallel.transfer import fingerprint, unpack
from piecework.runtime.program import Program
from piecework.store.protocol import KernelStore
from piecework.values.phases import DECODE, PREFILL

BindKey = Callable[[str], Program]
CaptureOf = Callable[[Any], Any]


class Follower:
    """Runs what rank 0 runs, on this rank's share of the weights and of the cache.

    `eager` is the function of tier 0 and `bound` the program that was bound at the start. `bind` binds another from
    this rank's store, `step_of` makes a step function of it, `capture_of` a captured program where graphs are recorded.
    """

    def __init__(
        self,
        channel: Channel,
        caches: Mapping[str, Any],
        *,
        eager: StepFunction,
        step_of: Callable[[Any], StepFunction],
        device: str = "cpu",
        backend: AttentionBackend | None = None,
        store: KernelStore | None = None,
        bound: Program | None = None,
        bind: BindKey | None = None,
        most_pages: int = 0,
    ) -> None:
        self.channel, self.caches = channel, caches
        self.phase = PREFILL
        self.num_steps = 0
        self.most_pages = most_pages
        self.capture_of: CaptureOf | None = None
        self._device, self._backend, self._store = device, backend, store
        self._step_of, self._bind = step_of, bind
        self._programs: dict[int, Any] = {} if bound is None else {BOUND: bound}
        self._functions: dict[int, StepFunction] = {EAGER: eager}
        if bound is not None:
            self._functions[BOUND] = step_of(bound)

    def follow(self, is_asked_to_end: Callable[[], bool] = lambda: False) -> Any:
        """Run what comes until rank 0 ends it; return the result that it gives, None where it gives none.

        `is_asked_to_end` tells whether this process was asked to end: rank 0 is told, and decides. Raises ParallelError
        where rank 0 is gone, SystemExit with its code where it has failed and says why itself.
        """
        has_passed_on = False
        while True:
            kind, body = self.channel.receive()
            if is_asked_to_end() and not has_passed_on:
                has_passed_on = True
                self.channel.post("end")
            if kind == STEP:
                self._run(unpack_step(body, self.caches, self._device, self._backend))
            elif kind == BIND:
                self._aside(self._take_up, body)
            elif kind == PROGRAM:
                self._aside(self._take_in, body)
            elif kind == CAPTURE:
                self._capture(_read(body)[0])
            elif kind == RESULT:
                return json.loads(body)
            elif kind == END:
                return self._end(body)

    def _end(self, body: bytes) -> None:
        if body:
            raise SystemExit(int(body))
        self.channel.meet(GRACE_S)

    def _run(self, sent: UnpackedStep) -> None:
        """Run a step. Where it fails, go on if it failed on rank 0 as well, else raise."""
        self.num_steps += 1
        self.phase = DECODE if sent.is_decode else PREFILL
        try:
            with torch.inference_mode(), step_context(sent.step), telling_of_loss(self.channel.placement):
                self._functions[sent.function](sent.input_ids, sent.position_ids, sent.rows)
        except ParallelError:
            raise
        except Exception as error:
            self.channel.post(f"failed {self.num_steps}")
            if not self._fell_together():
                raise ParallelError(
                    f"a step failed on rank {self.channel.placement.rank} and not on rank 0: "
                    f"{type(error).__name__}: {error}",
                    hint="the ranks can go on no more; all are started together again",
                    facts={"rank": self.channel.placement.rank, "step": self.num_steps},
                ) from error

    def _fell_together(self) -> bool:
        """Hear whether rank 0 failed in the same step."""
        try:
            kind, _ = self.channel.receive(GRACE_S)
            while kind == BEAT:
                kind, _ = self.channel.receive(GRACE_S)
        except ParallelError:
            return False
        return kind == FELL

    def _aside(self, work: Callable[[dict[str, Any], bytes], None], body: bytes) -> None:
        """Do what takes longer than a step in a thread of its own."""
        threading.Thread(target=work, args=_read(body), name="piecework-follow", daemon=True).start()

    def _take_up(self, what: dict[str, Any], _: bytes) -> None:
        """Bind a program from this rank's own store, if that holds what rank 0's does."""
        self._reply(f"bind {what['function']}", lambda: self._bound(what))

    def _bound(self, what: dict[str, Any]) -> str:
        assert self._store is not None
        try:
            if fingerprint(what["key"], self._store) != what["fingerprint"]:
                return "lacks"
            self._add(what)
        except StoreError:
            return "lacks"
        return "has"

    def _take_in(self, what: dict[str, Any], data: bytes) -> None:
        """Store a program that rank 0 sent, and bind it, where this rank does not have it."""
        if what["function"] in self._functions:
            return
        self._reply(f"stored {what['function']}", lambda: self._stored(what, data))

    def _stored(self, what: dict[str, Any], data: bytes) -> str:
        assert self._store is not None
        unpack(data, self._store)
        self._add(what)
        return "has"

    def _add(self, what: dict[str, Any]) -> None:
        assert self._bind is not None
        program = self._bind(what["key"])
        self._programs[what["function"]] = program
        self._functions[what["function"]] = self._step_of(program)

    def _reply(self, name: str, work: Callable[[], str]) -> None:
        """Post what became of a piece of work: a word, or an error as data."""
        try:
            said = work()
        except Exception as error:  # noqa: BLE001  whatever it is, rank 0 waits for a word
            said = json.dumps(error_data(error))
        self.channel.post(name, said)

    def _capture(self, what: dict[str, Any]) -> None:
        """Capture a size of a program, as rank 0 does; size 0 has it ready to serve."""
        function = what["function"]
        if function not in self._programs:
            assert self.capture_of is not None
            captured = self.capture_of(self._programs[what["source"]])
            self._programs[function], self._functions[function] = captured, self._step_of(captured)
        if what["size"]:
            self._programs[function].capture(what["phase"], what["size"])


def _read(body: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + length]), body[8 + length :]
