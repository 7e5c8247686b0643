"""Drift: hand a program its own texts, so that one step in so many is compared with eager while it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from piecework.events import Observer
from piecework.runtime.drift import watched
from piecework.runtime.program import Program
from piecework.seam.loader import load
from piecework.seam.operators import resolve_bodies
from piecework.stages.bind import bind
from piecework.stages.find import read_program, with_siblings
from piecework.store.protocol import KernelStore
from piecework.values.artifact import TEXT, Artifact, LoadedPiece


def watch_drift(
    program: Program, bodies: Mapping[str, Callable[..., Any]], store: KernelStore, every: int, observer: Observer
) -> Program:
    """Compare one step in `every` of a program with its texts; 0 leaves it as it is. A capture of it is not watched."""
    if every:
        make = partial(bind_texts, program, bodies, store)
        program.wrap(lambda call: watched(call, make, every, observer))
    return program


def bind_texts(program: Program, bodies: Mapping[str, Callable[..., Any]], store: KernelStore) -> Program:
    """Return a bound program's model as text: nothing of it is compiled, and it reads the same weights."""
    eager: Program | None = None
    record = read_program(program.key, store)
    for one in reversed(with_siblings(record, store)):
        loaded: dict[tuple[int, str], LoadedPiece] = {}
        for number, piece in enumerate(one.pieces):
            text = Artifact(TEXT, store.read_blob(piece.text).decode())
            loaded |= dict.fromkeys(
                ((number, box) for box in piece.artifacts), load(text, kernel_path=store.kernel_path)
            )
        eager = bind(one, loaded, program.weights, resolve_bodies(one, bodies), key="text", elsewhere=eager)
    assert eager is not None
    return eager
