"""Trace a piece to functional ATen operators, and print that as piece text again."""

from __future__ import annotations

from typing import Any

import torch

from piecework.errors import CompileError
from piecework.seam.convention import wrapper_work
from piecework.seam.fx import format_piece
from piecework.seam.inductor import exclusive_compile
from piecework.seam.layouts import keep_results
from piecework.seam.rebuild import RebuiltPiece
from piecework.values.rewriting import PassStep, PieceRewrite
from piecework.values.shapes import Box, format_box


def functional_text(
    piece: RebuiltPiece, box: Box, rewrite: PieceRewrite | None = None
) -> tuple[str, tuple[PassStep, ...]]:
    """Return the text of a piece as AOTAutograd hands it to a compiler: functional, of ATen operators alone.

    `rewrite` are passes over that graph, whose steps come with the text.
    """
    promised = piece.results
    graph, metadata = _trace(piece, box)
    with torch.no_grad():
        steps = rewrite(graph.graph) if rewrite is not None else ()
        keep_results(graph.graph, promised, metadata)
    work = wrapper_work(metadata)
    if work:
        raise CompileError(
            f"a piece cannot run as its functional graph alone: {work}",
            hint='use `compiler="eager"` or `compiler="inductor"` for this model',
        )
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    calls = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    other = next((node for node in calls if node.op != "call_function"), None)
    if other is not None or not all(isinstance(value, torch.fx.Node) for value in outputs):
        raise CompileError(
            "a piece holds tensors or numbers of its own, which its functional graph does not show as text",
            hint='use `compiler="eager"` or `compiler="inductor"` for this model',
        )
    specs = zip(placeholders, piece.names, map(str, piece.specs), strict=True)
    return format_piece(list(specs), calls, outputs), steps


def _trace(piece: RebuiltPiece, box: Box) -> tuple[Any, Any]:
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, tracing

    captured: list[tuple[Any, Any]] = []

    def capture(gm: Any, example_inputs: Any) -> Any:
        captured.append((gm, TracingContext.get().fw_metadata))
        return gm.forward

    with exclusive_compile(box), tracing(TracingContext(piece.mode)):
        aot_module_simplified(
            piece.module, piece.inputs, fw_compiler=capture, decompositions={}, keep_inference_input_mutations=True
        )
    if len(captured) != 1:
        raise CompileError(f"AOTAutograd traced {len(captured)} graphs for range `{format_box(box)}`")
    return captured[0]
