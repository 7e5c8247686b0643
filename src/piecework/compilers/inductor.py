"""The compiler that a program runs on by default: Inductor's output code, freed of Inductor."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from piecework.seam.build_folder import private_folder
from piecework.seam.check import check_seam
from piecework.seam.convention import check_convention
from piecework.seam.cpp_build import CppBuilds, ask_compiler
from piecework.seam.cpp_header import CppBuildError, CppHeaders
from piecework.seam.cut_text import release_early
from piecework.seam.failures import compile_error
from piecework.seam.few_rows import NAME as FEW_ROWS
from piecework.seam.few_rows import few_rows_kernel, use_few_rows
from piecework.seam.guards import assumed_guards
from piecework.seam.inductor import CompilerOutput, begin_header, bundle, run_inductor
from piecework.seam.kernels import misaligned_inputs, read_constants, read_kernels
from piecework.seam.probe import machine_facts
from piecework.seam.rebuild import RebuiltPiece, rebuild_piece
from piecework.seam.strip import strip_output
from piecework.seam.vocabulary import Refusal
from piecework.span_events import sub_phase
from piecework.spans import carry
from piecework.values.artifact import INDUCTOR, TORCH, Artifact
from piecework.values.digest import digest_data
from piecework.values.rewriting import PieceRewrite
from piecework.values.shapes import Box

FORMAT = 5  # of the text and its calling convention; a change here misses every artifact made before


class InductorCompiler:
    """Compile pieces with Inductor; `options` are Inductor's own settings, on top of ours.

    `threads` is the number of CPU threads that kernels are built for, `working_folder` where the compiler's files lie
    until the build ends (the temp folder where it is empty). Inside `with compiler:` pieces share what they can.
    `headers` are those that compilers made of one another share.
    """

    name = "inductor"

    def __init__(
        self,
        *,
        options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        working_folder: str | None = None,
        rewrite: PieceRewrite | None = None,
        apart: Sequence[str] = (),
        headers: CppHeaders | None = None,
    ) -> None:
        self._rewrite = rewrite
        self._apart = tuple(sorted(apart))
        self._options = dict(options or {})
        self._threads = threads or torch.get_num_threads()
        self._parent = working_folder
        self._open: contextlib.ExitStack | None = None
        self._has_folder = False
        self._headers = headers or CppHeaders()
        self._builds = CppBuilds(self._headers)
        self._lock = threading.Lock()

    def with_passes(self, rewrite: PieceRewrite) -> InductorCompiler:
        """Return a compiler that runs passes over each functional piece."""
        return self._with(rewrite, self._apart)

    def keeping_apart(self, operators: Sequence[str]) -> InductorCompiler:
        """Return a compiler for pieces with opaque operators inside, as `ns::op`.

        Their calls stand side by side where they can, and what they are handed is written over by nothing else.
        """
        return self._with(self._rewrite, operators)

    def _with(self, rewrite: PieceRewrite | None, apart: Sequence[str]) -> InductorCompiler:
        return InductorCompiler(
            options=self._options, threads=self._threads, working_folder=self._parent, rewrite=rewrite, apart=apart,
            headers=self._headers,
        )  # fmt: skip

    @property
    def version(self) -> str:
        """What beside piece, range and machine decides the artifact."""
        extra = f" options={digest_data(self._options)[:16]}" if self._options else ""
        passes = f" passes={self._rewrite.digest}" if self._rewrite is not None else ""
        apart = f" apart={','.join(self._apart)}" if self._apart else ""
        return f"format={FORMAT} torch={torch.__version__} threads={self._threads}{extra}{passes}{apart}"

    def __enter__(self) -> InductorCompiler:
        self._open = contextlib.ExitStack()  # the folder is made by the first piece: there may be none to compile
        self._open.enter_context(self._headers.using())
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._builds.expect(0)
            self._open.close()
            self._open, self._has_folder = None, False

    @contextlib.contextmanager
    def preparing(self, observer: Any) -> Iterator[None]:
        """Begin what the C++ of many pieces needs, beside what the block does before it comes to compile them."""
        with self._headers.using():
            begin_header(self._headers, self._settings(), self._parent, observer)
            yield

    def expect(self, count: int) -> None:
        """Say how many artifacts will be compiled inside this `with`: from some number on, headers are precompiled."""
        self._builds.expect(count)

    def compile(self, text: str, box: Box) -> Artifact:
        """Compile one piece for one box; output that our loader does not know becomes kind `torch`, with the reason.

        May be called from several threads: pieces are lowered one at a time, and their C++ is built side by side.
        What code set in Inductor's own configuration is not seen: it would be in no key. `options` are.
        """
        return contextvars.Context().run(carry(self._compile), text, box)

    def _compile(self, text: str, box: Box) -> Artifact:
        check_seam()
        with self._folder():
            try:
                return self._make(text, box, is_trusting=True)
            except CppBuildError:
                ask_compiler()  # the C++ compiler may lack an instruction set that the processor has
            try:
                return self._make(text, box, is_trusting=False)
            except CppBuildError as error:
                raise compile_error(error, box) from error

    def _make(self, text: str, box: Box, *, is_trusting: bool) -> Artifact:
        with sub_phase("rebuild"):
            piece = rebuild_piece(text, box)
        apart = frozenset(self._apart)
        output = run_inductor(piece, box, self._settings(), is_trusting=is_trusting, rewrite=self._rewrite, apart=apart)
        with sub_phase("guards"):
            guards = assumed_guards(piece, box)
        facts = _facts(piece, output)
        try:
            with sub_phase("strip"):
                return self._strip(piece, box, output, guards, facts)
        except Refusal as refusal:
            blob = bundle(rebuild_piece(text, box), box, self._options)
            return Artifact(TORCH, text, {"artifact": blob}, guards, facts | {"fall_back": str(refusal)})

    def _settings(self) -> dict[str, Any]:
        return {"cpp.threads": self._threads, **self._options}

    def _strip(
        self, piece: RebuiltPiece, box: Box, output: CompilerOutput, guards: tuple[str, ...], facts: dict[str, Any]
    ) -> Artifact:
        aligned = misaligned_inputs(output, piece.names)
        stripped = strip_output(output.source, piece.names, piece.weight_names, read_constants(output), aligned)
        check_convention(piece.names, output.metadata, stripped)
        text, products = use_few_rows(stripped.text, piece.tensor_specs, box, output.vector_isa)
        own = {FEW_ROWS: few_rows_kernel(self._threads)} if products else {}
        kernels, more = read_kernels(output, stripped.kernels, self._builds, own)
        more |= {"few_rows": products} if products else {}
        text = release_early(text) if self._apart else text
        return Artifact(INDUCTOR, text, kernels, guards, facts | {"namespaces": list(stripped.namespaces)} | more)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[None]:
        if self._open is None:
            with private_folder(self._parent):
                yield
        else:
            with self._lock:
                if not self._has_folder:
                    self._open.enter_context(private_folder(self._parent))
                    self._has_folder = True
            yield


def _facts(piece: RebuiltPiece, output: CompilerOutput) -> dict[str, Any]:
    devices = sorted({value.device.type for value in piece.inputs if isinstance(value, torch.Tensor)}) or ["cpu"]
    facts: dict[str, Any] = {
        "machine": machine_facts("cuda" if "cuda" in devices else "cpu"),
        "devices": devices,
        "parameters": list(piece.call_names),
        "weights": list(piece.weight_names),
        "hints": dict(piece.hints),
    }
    if output.passes:
        facts["passes"] = [step.report.as_dict() for step in output.passes]
    if output.cpp_compiler:
        facts |= {"isa": output.vector_isa, "cpp_compiler": output.cpp_compiler}
    return facts
