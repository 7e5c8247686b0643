"""What does a product of few rows cost by our kernel, against torch's?

    .venv/bin/python benchmarks/few_rows.py [--threads N]

Products of each shape of SmolLM2-135M, as many as the model has, so that weights come from memory and not from a cache:
all of them by `torch.mm`, then all by the kernel that a piece gets, by turns.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from measure import write_result
from piecework.compilers.inductor import InductorCompiler
from piecework.seam.few_rows import NAME
from piecework.seam.loader import load_library
from piecework.values.shapes import Range

HERE = pathlib.Path(__file__).resolve().parent
QUESTION = "What does a product of few rows cost by our kernel, against torch's?"
CAVEATS = ("Ratios of the least of several times of each, taken by turns in one process.", "float32.")
LAYERS = 30
SHAPES = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
HEAD = (49152, 576)
PIECE = """def piece(
    s0: "int",
    x0: "float32[s0, 8] cpu",
    w0: "weight float32[8, 8] cpu",
):
    v0 = torch.nn.functional.linear(x0, w0)
    return (v0,)
"""


def built_kernel(threads: int, place: str) -> Callable[..., None]:
    """Return the kernel as a piece gets it."""
    artifact = InductorCompiler(threads=threads, working_folder=place).compile(PIECE, {"s0": Range(2, 64)})
    path = pathlib.Path(place, "few_rows.so")
    path.write_bytes(artifact.kernels[NAME])
    return getattr(load_library(path), NAME)  # type: ignore[no-any-return]


def times(rows: int, weights: list[torch.Tensor], kernel: Callable[..., None], turns: int) -> tuple[float, float]:
    """Return the least seconds of all products by `mm` and by the kernel."""
    inputs = {depth: torch.randn(rows, depth) for depth in {w.shape[1] for w in weights}}
    outputs = [torch.empty(rows, w.shape[0]) for w in weights]
    turned = [w.t() for w in weights]

    def by_mm() -> None:
        for w, out in zip(turned, outputs, strict=True):
            torch.mm(inputs[w.shape[0]], w, out=out)

    def by_kernel() -> None:
        for w, out in zip(weights, outputs, strict=True):
            width, depth = w.shape
            kernel(inputs[depth], w, 0, out, rows, width, depth, depth, 0, width)

    taken: dict[Callable[[], None], list[float]] = {by_mm: [], by_kernel: []}
    for _ in range(turns):
        for function, found in taken.items():
            begin = time.perf_counter()
            function()
            found.append(time.perf_counter() - begin)
    return min(taken[by_mm]), min(taken[by_kernel])


def main() -> None:
    """Time each number of rows, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "few_rows_cpu.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    layers = [torch.randn(shape) for _ in range(LAYERS) for shape in SHAPES]
    head = [torch.randn(HEAD)]
    readings = {}
    with tempfile.TemporaryDirectory() as place:
        kernel = built_kernel(given.threads, place)
        for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
            found = {"layers": times(rows, layers, kernel, given.turns), "head": times(rows, head, kernel, given.turns)}
            readings[rows] = {
                name: {"mm_ms": 1e3 * a, "kernel_ms": 1e3 * b, "ratio": b / a} for name, (a, b) in found.items()
            }
    used = [reading[name]["ratio"] for reading in readings.values() for name in reading]
    body = {"threads": given.threads, "median_ratio": statistics.median(used), "readings": readings}
    write_result(given.output, question=QUESTION, caveats=CAVEATS, body=body)
    print(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
