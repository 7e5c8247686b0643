"""One step of a program, region by region: each site's compiled forms run beside its text, all on the same inputs.

What a site hands on is what its text gives, so that no form's error reaches the next site: the first site at which a
form differs is where it is wrong. Opaque bodies run once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from piecework.diagnostics.captured_form import CapturedPiece, MakeDevice
from piecework.errors import CompileError
from piecework.runtime.program import Program
from piecework.runtime.regions import BoundRun, bound_run
from piecework.runtime.signature import compile_check
from piecework.seam.evaluate import operators_of
from piecework.seam.fx import PieceGraph, parse_piece
from piecework.seam.loader import load
from piecework.seam.stand_in import stand_ins
from piecework.stages.bind import bind
from piecework.stages.bind.outline import whole_outline
from piecework.stages.verify.beside import Expected, expect, own_inputs
from piecework.store.artifacts import read_artifact
from piecework.store.protocol import KernelStore
from piecework.values.artifact import INDUCTOR, TEXT, Artifact, Compiler, LoadedPiece
from piecework.values.difference import Difference
from piecework.values.graph import PIECE
from piecework.values.packing import join, part_specs
from piecework.values.record import Record
from piecework.values.shapes import Box, box_for, format_box

Make = Callable[[int, str, Box], Artifact]
_STATIC = ("weight", "buffer", "constant")


def _tensor(weights: Mapping[str, Tensor], binding: Mapping[str, Any]) -> Tensor:
    parts = part_specs(binding)
    return join([weights[part] for part in parts]) if parts else weights[binding["name"]]



@dataclass(frozen=True)
class Form:
    """One way in which pieces run: how the artifact of a piece for a box is come by, and what stands around it."""

    name: str
    make: Make
    around: Callable[[LoadedPiece], LoadedPiece] = lambda loaded: loaded


@dataclass(frozen=True)
class Place:
    """A site: its region, its piece and the box that serves it."""

    region: int
    piece: int
    box: Box
    text: str


@dataclass(frozen=True)
class Divergence:
    """The first tensor in which a form differs from the text: where, by how much, and on which inputs."""

    form: str
    place: Place
    difference: Difference
    values: Sequence[Any] = field(repr=False)
    artifact: Artifact = field(repr=False)


class Lockstep:
    """Runs a record's program as text, with each form beside it; called like the program.

    `first` holds for each form where it first differed, `eager_error` what eager's own errors sum up to,
    `calls` how often each form's pieces were called.
    """

    def __init__(
        self,
        record: Record,
        store: KernelStore,
        weights: Mapping[str, Tensor],
        bodies: Mapping[str, Callable[..., Any]],
        forms: Sequence[Form],
        elsewhere: Lockstep | None = None,
    ) -> None:
        self.record = record
        self.first: dict[str, Divergence] = {} if elsewhere is None else elsewhere.first
        self.skipped: dict[str, str] = {} if elsewhere is None else elsewhere.skipped
        self.calls: dict[str, int] = {form.name: 0 for form in forms}
        self.eager_error = 0.0
        self._forms = forms
        self._store = store
        self._texts = [store.read_blob(piece.text).decode() for piece in record.pieces]
        self._pieces = [parse_piece(text) for text in self._texts]
        self._loaded: dict[tuple[str, int, str], tuple[LoadedPiece, Artifact]] = {}
        self.text_program = self._bind_texts(weights, bodies)
        bound = self.text_program.bound
        assert bound is not None
        self._static = {v: _tensor(weights, b) for v, b in record.values.items() if b["kind"] in _STATIC}
        runs = [
            partial(self._walk, bound_run(run, whole_outline(record)), box)
            for run, box in zip(bound.runs, bound.boxes, strict=True)
        ]
        self._call, _ = compile_check(bound.leaves, bound.checked, runs, elsewhere)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; the result is that of the texts."""
        return self._call(*args, **kwargs)

    def _bind_texts(self, weights: Mapping[str, Tensor], bodies: Mapping[str, Callable[..., Any]]) -> Program:
        loaded: dict[tuple[int, str], LoadedPiece] = {}
        for number, piece in enumerate(self.record.pieces):
            text = load(Artifact(TEXT, self._texts[number]), kernel_path=self._store.kernel_path)
            loaded |= dict.fromkeys(((number, box) for box in piece.artifacts), text)
        return bind(self.record, loaded, weights, bodies, key="text")

    def _walk(self, run: BoundRun, chosen: Mapping[str, Any], *passed: Any) -> Any:
        known: dict[str, Any] = dict(zip(run.parameters, passed, strict=True))
        for index, (region, noted) in enumerate(zip(run.regions, self.record.regions, strict=True)):
            if region.kind == PIECE:
                number = noted["piece"]
                place = Place(index, number, box_for(noted["symbols"], chosen), self._texts[number])
                values = [self._static[a] if a in self._static else known[a] for a in noted["arguments"]]
                self._compare(place, self._pieces[number], values)
            results = region.call(*(known[name] for name in region.arguments))
            known |= zip(region.results, results, strict=True)
        return run.result.call(*(known[name] for name in run.result.arguments))

    def _compare(self, place: Place, piece: PieceGraph, values: Sequence[Any]) -> None:
        """Run each form that has not differed yet beside the text."""
        left = [form for form in self._forms if form.name not in self.first]
        expected: Expected = expect(piece, values)
        self.eager_error += expected.eager_error()
        for form in left:
            found = self._form(form, place)
            if found is None:
                continue
            loaded, artifact = found
            self.calls[form.name] += 1
            difference = next((each for each in expected.against(loaded) if each.is_fault), None)
            if difference is not None:
                kept = own_inputs(piece, values)  # the step goes on, and may write to them
                self.first[form.name] = Divergence(form.name, place, difference, kept, artifact)

    def _form(self, form: Form, place: Place) -> tuple[LoadedPiece, Artifact] | None:
        key = (form.name, place.piece, format_box(place.box))
        if key not in self._loaded:
            try:
                artifact = form.make(place.piece, place.text, place.box)
                loaded = load(artifact, kernel_path=kernel_paths(artifact, self._store))
                bodies = stand_ins(operators_of(self._pieces[place.piece]))
                if bodies and artifact.kind not in (TEXT, INDUCTOR):
                    raise CompileError(f"it calls `{next(iter(bodies))}` inside, and has no text to stand in for it")
                loaded = loaded.with_bodies(bodies) if bodies else loaded
                self._loaded[key] = (form.around(loaded), artifact)
            except CompileError as error:
                self.skipped[form.name] = error.message
                return None
        return self._loaded[key]


def kernel_paths(artifact: Artifact, store: KernelStore) -> Callable[[str], Path]:
    """Put an artifact's kernels where the loader finds them."""
    for data in artifact.kernels.values():
        store.write_blob(data)
    return store.kernel_path


def stored_form(record: Record, store: KernelStore, make_device: MakeDevice | None = None) -> Form:
    """Return the form that the store holds: what the program runs, or with a device what a capture of it replays."""

    def make(number: int, text: str, box: Box) -> Artifact:
        return read_artifact(store, record.pieces[number].artifacts[format_box(box)])

    if make_device is not None:
        return Form("captured", make, lambda loaded: CapturedPiece(loaded, make_device))
    return Form("compiled", make)


def made_form(name: str, compiler: Compiler) -> Form:
    """Return the form that a compiler makes now."""
    return Form(name, lambda number, text, box: compiler.compile(text, box))
