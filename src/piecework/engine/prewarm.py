"""Run chosen shapes through an engine before it serves, and watch what compiles once it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from piecework.engine.batch import Batch
from piecework.engine.loop import Engine
from piecework.engine.manifest import Specialisation, append
from piecework.engine.options import Progress
from piecework.engine.sequence import Request, SamplingParameters
from piecework.engine.served import Runner
from piecework.engine.shapes import Coverage, StepShape
from piecework.errors import OptionError
from piecework.seam.forbid import Compile, watch_compilation
from piecework.values.phases import DECODE, PREFILL

log = logging.getLogger(__name__)


class WatchedRunner:
    """Runs what another runner runs, and knows the shape of the step that is under way."""

    def __init__(self, runner: Runner, coverage: Coverage) -> None:
        self._runner = runner
        self._coverage = coverage
        self.seen: set[tuple[str, int, int]] = set()
        self.running: StepShape | None = None
        self.thread = 0

    def run(self, batch: Batch) -> Tensor:
        """Run the batch.

        Tensors:
            ->  [N, V]  model
        """
        shape = shape_of(batch)
        self.seen.add((shape.phase, shape.num_tokens, shape.num_sequences))
        if self._coverage.note(shape):
            log.info("a shape that the start had not run: %s (%d tokens)", shape.kind, shape.num_tokens)
        self.running, self.thread = shape, threading.get_ident()
        try:
            logits = self._runner.run(batch)
        finally:
            self.running = None
        self._coverage.served(shape, getattr(self._runner, "used", 0))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def shape_of(batch: Batch) -> StepShape:
    """Return the shape of a batch."""
    return StepShape(
        phase=DECODE if batch.is_decode else PREFILL,
        num_tokens=batch.num_tokens,
        num_sequences=len(batch.scheduled),
        longest=max(each.end for each in batch.scheduled),
    )


def watch_shapes(engine: Engine, coverage: Coverage) -> WatchedRunner:
    """Have an engine's steps noted from now on."""
    runner = WatchedRunner(engine.runner, coverage)
    engine.runner = runner
    return runner


@contextmanager
def watch_misses(
    runner: Callable[[], WatchedRunner | None],
    manifest: Path | None,
    hear: Callable[[Specialisation], None],
) -> Iterator[None]:
    """Log each compile in the process until the block ends, with the step that caused it; add it to the manifest."""
    lock = threading.Lock()
    written: set[tuple[str, str, str]] = set()

    def caught(compile_: Compile) -> None:
        watched = runner()
        is_ours = watched is not None and watched.thread == threading.get_ident()
        found = Specialisation(compile_.kind, compile_.what, watched.running if watched and is_ours else None)
        log.warning("JIT miss: %s", found)
        hear(found)
        if manifest is None:
            return
        with lock:
            line = (found.kind, found.what, str(found.shape))
            if line not in written:
                written.add(line)
                try:
                    append(manifest, found)
                except OSError as error:
                    log.error("the manifest `%s` takes no lines: %s", manifest, error)

    with watch_compilation(caught):
        yield


def run_shapes(
    engine: Engine, runner: WatchedRunner, shapes: Sequence[StepShape], report: Callable[[Progress], None]
) -> tuple[StepShape, ...]:
    """Run each shape once, with prompts of no meaning; return those that the engine's limits do not allow.

    It is called before requests are taken, by the thread that the engine belongs to.
    """
    refused = []
    for number, shape in enumerate(shapes):
        report(Progress("prewarming", number, len(shapes), shape.kind))
        try:
            _run(engine, shape, number)
        except OptionError as error:
            log.warning("prewarm: %s cannot be run here: %s", shape.kind, error.message)
            refused.append(shape)
            continue
        if (shape.phase, shape.num_tokens, shape.num_sequences) not in runner.seen:
            log.warning("prewarm: no step came out as %s (%d tokens)", shape.kind, shape.num_tokens)
            refused.append(shape)
    if shapes:
        report(Progress("prewarming", len(shapes), len(shapes)))
    return tuple(refused)


def _run(engine: Engine, shape: StepShape, number: int) -> None:
    """Have a step of one shape: all its sequences come in at once, and are decoded together where it is of decode."""
    limits = engine.options
    if shape.num_sequences > limits.max_num_sequences or shape.num_tokens > limits.max_num_batched_tokens:
        raise OptionError(
            f"a step has at most {limits.max_num_batched_tokens} tokens of {limits.max_num_sequences} sequences",
            hint="raise the engine's limits",
        )
    count = shape.num_sequences
    if shape.phase == DECODE:
        lengths = [max(1, shape.longest - 1)] + [1] * (count - 1)
        num_chunks = -(-sum(lengths) // limits.max_num_batched_tokens)
        max_tokens = 1 + num_chunks
    else:
        each, rest = divmod(shape.num_tokens, count)
        lengths = [each + (index < rest) for index in range(count)]
        max_tokens = 1
    parameters = SamplingParameters(max_tokens=max_tokens, ignore_eos=True)
    names = [f"prewarm-{number}-{index}" for index in range(count)]
    requests = [
        Request(name, _prompt(engine, length, number * limits.max_num_sequences + index), parameters)
        for index, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]
    for request in requests:
        engine.check(request)
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()


def _prompt(engine: Engine, length: int, serial: int) -> tuple[int, ...]:
    """Return a prompt that begins as no other does, so that no pages of an earlier one are found for it."""
    size = max(2, engine.served.vocabulary_size)
    digits = []
    left = serial + 1
    while left:
        left, digit = divmod(left, size)
        digits.append(digit)
    return tuple((digits + [0] * length)[:length])
