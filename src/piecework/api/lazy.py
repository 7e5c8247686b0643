"""What makes artifacts of single sizes while a program serves: handed in at bind, off by default."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from piecework.errors import PieceworkError
from piecework.events import FallBack, Observer, SizeReady
from piecework.pipeline import Request
from piecework.runtime.lazy_sizes import Loaded, OnDemand
from piecework.seam.forbid import is_forbidden
from piecework.stages.load import load_artifacts
from piecework.store.protocol import ARTIFACT, KernelStore
from piecework.values.artifact import keeping_apart
from piecework.values.graph import inside
from piecework.values.record import Record
from piecework.values.shapes import Box, Range, box_for, combinations, format_box, parse_range
from piecework.values.verdict import Check, let_pass


class SizeCompiler:
    """Compiles every piece of a record for one size into the store, one size at a time, and loads what it made."""

    def __init__(self, request: Request, store: KernelStore, observer: Observer) -> None:
        self._request = request
        self._store = store
        self._observer = observer
        self._lock = threading.Lock()

    def load(self, record: Record, size: int) -> Loaded | None:
        """Return the pieces for a size of the first symbol; None, with an event that says why, if there are none."""
        with self._told(size), self._lock:
            return self._load(record, size)
        return None

    @contextmanager
    def _told(self, size: int) -> Iterator[None]:
        """Tell of what goes wrong, and go on: a step is never to fail for what would have made it faster."""
        try:
            yield
        except PieceworkError as error:
            self._refuse(size, error.message)
        except Exception as error:  # noqa: BLE001  # a compiler of the user's own may raise anything, in a thread of ours
            self._refuse(size, f"{type(error).__name__}: {error}")

    def _refuse(self, size: int, reason: str) -> None:
        self._observer(FallBack(what=f"size {size} stays with the artifacts of its range", reason=reason))

    def _load(self, record: Record, size: int) -> Loaded | None:
        from piecework.stages.compile import Job, compile_jobs

        request, store = self._request, self._store
        compiler = keeping_apart(request.compiler, inside(record.partition, record.split_ops))
        texts = [store.read_blob(piece.text).decode() for piece in record.pieces]
        boxes = boxes_at(record, size)
        jobs = [Job(number, texts[number], text, box) for (number, text), box in boxes.items()]
        parts = compile_jobs(
            jobs, compiler, request.fall_back, request.toolchain, store, self._observer,
            environment=request.environment, cpp_compiler=request.cpp_compiler,
            budget_s=request.budget_s, check=self._check(),
        )  # fmt: skip
        wanted = {place: each[0].key for place, each in parts.items() if len(each) == 1}
        for place in boxes:
            if place not in wanted:
                self._refuse(size, f"the compiler assumed more of piece {place[0]} than the size says")
                return None
            reason = store.read_record(ARTIFACT, wanted[place])["facts"].get("fall_back")
            if reason:
                self._refuse(size, f"piece {place[0]}: {reason}")
                return None
        return load_artifacts(wanted, [piece.text for piece in record.pieces], store, self._observer)

    def _check(self) -> Check:
        if not self._request.verify:
            return let_pass
        from piecework.stages.verify import Verification

        return Verification(self._store.kernel_path)

    def ready(self, size: int, start_ns: int) -> None:
        """Tell that a size is served by its own artifacts from now on."""
        self._observer(SizeReady(size=size, start_ns=start_ns))


def boxes_at(record: Record, size: int) -> dict[tuple[int, str], Box]:
    """Return the boxes of each piece at one size of the first symbol, by piece and text."""
    first, *others = (symbol["name"] for symbol in record.symbols)
    ranges: Mapping[str, Any] = {first: (Range(size, size),)} | {
        name: tuple(map(parse_range, record.ranges[name])) for name in others
    }
    sites = [region for region in record.regions if region["kind"] == "piece"]
    found = {}
    for region, chosen in itertools.product(sites, combinations(ranges)):
        box = box_for(region["symbols"], chosen)
        found[region["piece"], format_box(box)] = box
    return found


def on_demand(request: Request, sizes: tuple[int, ...], store: KernelStore, observer: Observer) -> OnDemand | None:
    """Return what a program is to be bound with for `lazy_sizes`; None where there are none."""
    if not sizes:
        return None
    compiler = SizeCompiler(request, store, observer)
    return OnDemand(sizes, compiler.load, lambda: not is_forbidden(), compiler.ready)
