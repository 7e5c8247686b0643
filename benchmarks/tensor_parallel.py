"""What do several ranks gain for a model of Llama-3-8B's shape, and how near do their sums come to the link's rate?

    torchrun --nproc-per-node=2 -m benchmarks.tensor_parallel [--tiny] [--fused] [--out FILE]

Random weights in bf16. Each rank first runs the whole model by itself, then its share of it: without and with
`sequence_parallel`. Decode at 1 and 64 sequences of 1,024 tokens (captured as one graph on a GPU), prefill of 4,096.
The bytes that a step sends are counted from the record and held against the link's rate. `--fused` also times torch's
products that are fused with their half of a collective. Without a GPU the ranks speak gloo, and `--tiny` tries the
script: those figures mean nothing. Keep NVLink multicast off: NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.llama_shape import DEVICE, LLAMA_8B, TINY, Llama, Metadata, Shape, metadata
from benchmarks.measure import write_result
from torch import Tensor, nn

from piecework.api.programs import compile as compile_program
from piecework.options import CompileOptions
from piecework.parallel.plan import Heads
from piecework.parallel.ranks import Ranks, join
from piecework.parallel.shard import shard_model
from piecework.parallel.wire import count_collectives, sent_bytes
from piecework.seam.groups import standing_in
from piecework.stages.find import read_program
from piecework.store.disk import DiskStore
from piecework.values.declaration import Dim

LINK_BYTES_PER_S = 450e9  # NVLink 4 of an H200, one direction (NVIDIA's data sheet: 900 GB/s both)
LENGTH, ROUNDS, STEPS = 1024, 7, 10
SIDES = {"alone": (), "ranks": (), "ranks, rows shared out": ("sequence_parallel",)}
PLAN = {
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",
    **{f"layers.*.{name}": "colwise" for name in ("q", "k", "v", "gate", "up")},
    **{f"layers.*.{name}": "rowwise" for name in ("out", "down")},
}
CAVEATS = (
    "Random weights: times hold for the shape, numbers mean nothing.",
    "Attention is torch's scaled_dot_product_attention over contiguous pages.",
    "A step's time is the median of rounds on rank 0; a round is the mean of its steps, ranks beginning together.",
    "Bytes are what one rank sends by the ring algorithms; the link's rate is the data sheet's for one direction.",
)
HAS_GPU = DEVICE == "cuda"


class Stepping(Llama):
    """The model with logits of chosen rows alone: those of a whole prompt would be most of what is sent."""

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.cos[positions][:, None].to(x.dtype), self.sin[positions][:, None].to(x.dtype)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        return self.head(self.norm(x, residual)[0][rows])


def share(model: nn.Module, shape: Shape, ranks: Ranks) -> nn.Module:
    """Leave a rank's part of a model, with random weights of its own."""
    heads = {f"layers.{number}": Heads(shape.heads, shape.kv_heads) for number in range(shape.layers)}
    shard_model(model, PLAN, ranks.size, heads)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.shape = part_of(shape, ranks.size)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                own = torch.empty(parameter.shape, device=DEVICE, dtype=parameter.dtype).normal_(0, 0.02)
                setattr(module, name, nn.Parameter(own, requires_grad=False))
        if hasattr(module, "tensor_parallel_rank"):
            module.tensor_parallel_rank = torch.tensor(ranks.rank, device=DEVICE)
    return model


def part_of(shape: Shape, ranks: int) -> Shape:
    """Return the heads of one rank; a head keeps its width."""
    return replace(shape, hidden=shape.hidden // ranks, heads=shape.heads // ranks, kv_heads=shape.kv_heads // ranks)


def inputs(shape: Shape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make a step's ids, positions and wanted rows: the last ones, at least two."""
    source = torch.Generator(device=DEVICE).manual_seed(0)
    ids = torch.randint(0, shape.words, (tokens,), device=DEVICE, generator=source)
    rows = torch.arange(max(0, tokens - 64) if tokens <= 64 else tokens - 2, tokens, device=DEVICE)
    rows = rows if len(rows) > 1 else rows.repeat(2)
    return ids, torch.arange(tokens, device=DEVICE) % LENGTH, rows


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a replay of a call as one graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def step_ms(call: Callable[[], Any]) -> float:
    """Return the time of a step in milliseconds."""
    for _ in range(3):
        call()
    found = []
    for _ in range(ROUNDS):
        if HAS_GPU:
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            call()
        if HAS_GPU:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / STEPS * 1e3)
    return statistics.median(found)


def measure(side: str, shape: Shape, sizes: dict[str, int], ranks: Ranks, folder: str, compiler: str) -> dict[str, Any]:
    """Compile one side, and time its steps of each size."""
    torch.manual_seed(0)
    model: Any = Stepping(shape, torch.bfloat16, is_apart=True).eval()
    own = shape
    if side != "alone":
        model, own = share(model, shape, ranks), part_of(shape, ranks.size)
    most = max(sizes.values())
    step = Metadata.allocate(own, 64, LENGTH, torch.bfloat16, is_masked=False)
    options = CompileOptions(
        compiler=compiler, passes=SIDES[side], max_num_batched_tokens=most, ranges=((1, 64), (65, most)), verify=False
    )
    dynamic = {"ids": {0: "tokens"}, "positions": {0: "tokens"}, "rows": {0: Dim("rows", low=2, high=64)}}
    store = DiskStore(folder)
    with metadata(step), standing_in(ranks.group, ranks.size):
        program = compile_program(model, inputs(shape, 64), dynamic=dynamic, options=options, store=store)
    notes = read_program(program.key, store).notes
    ranks.enter()
    found: dict[str, Any] = {"collectives": count_collectives(notes), "key": program.key}
    for name, tokens in sizes.items():
        given = inputs(shape, tokens)
        with metadata(step), torch.inference_mode():
            call = lambda given=given: program(*given)  # noqa: E731
            if HAS_GPU and tokens <= 64:
                call = captured(call)
            took_ms = step_ms(call)
        sent = sent_bytes(notes, {"tokens": tokens, "rows": len(given[2])})
        found[name] = {
            "step_ms": round(took_ms, 4),
            "sent_bytes": sent,
            "link_ms": round(sent / LINK_BYTES_PER_S * 1e3, 4),
        }
    return found


def fused(shape: Shape, ranks: Ranks) -> dict[str, Any]:
    """Time torch's fused products for a prompt of 4,096 tokens beside the same as two calls, and compare results."""
    import torch.distributed._symmetric_memory  # registers the operators

    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    found: dict[str, Any] = {name: hasattr(torch.ops.symm_mem, name) for name in names}
    if not (HAS_GPU and all(found.values())):
        return found
    group, c10d = dist.group.WORLD.group_name, torch.ops._c10d_functional
    wide = torch.randn(4096, shape.feed_forward // ranks.size, device=DEVICE, dtype=torch.bfloat16)
    down = torch.randn(shape.feed_forward // ranks.size, shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    rows = torch.randn(4096 // ranks.size, shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    up = torch.randn(shape.hidden, shape.feed_forward // ranks.size, device=DEVICE, dtype=torch.bfloat16)

    def apart_scatter() -> Tensor:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(wide @ down, "sum", ranks.size, group))

    def apart_gather() -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(rows, ranks.size, group)) @ up

    def fused_scatter() -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(wide, down, "sum", 0, group)

    def fused_gather() -> Tensor:
        return torch.ops.symm_mem.fused_all_gather_matmul(rows, [up], 0, group)[1][0]

    for name, one, other in (("scatter", apart_scatter, fused_scatter), ("gather", apart_gather, fused_gather)):
        error = (one().float() - other().float()).norm() / one().float().norm()
        found[name] = {"apart_ms": step_ms(one), "fused_ms": step_ms(other), "relative_error": float(error)}
    return found


def main() -> None:
    """Measure each side on all ranks; rank 0 tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--fused", action="store_true", help="also time torch's fused products")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    ranks = join(int(os.environ.get("WORLD_SIZE", "0")), DEVICE, dict(os.environ))
    shape = TINY if given.tiny else LLAMA_8B
    sizes = {"decode 1": 1, "decode 64": 64, "prefill": 256 if given.tiny else 4096}
    folder = str(ranks.share(tempfile.mkdtemp())[0])
    sides = {}
    for side in SIDES:
        sides[side] = measure(side, shape, sizes, ranks, folder, given.compiler)
        ranks.must_agree(sides[side].pop("key"), "the programs' keys")
        gc.collect()
        if HAS_GPU:
            torch.cuda.empty_cache()
    body = {"ranks": ranks.size, "backend": dist.get_backend(), "shape": vars(shape), "sides": sides}
    body["of_alone"] = {
        side: {name: round(sides[side][name]["step_ms"] / sides["alone"][name]["step_ms"], 3) for name in sizes}
        for side in SIDES
    }
    if given.fused:
        body["fused"] = fused(shape, ranks)
    if ranks.rank == 0:
        if given.out is not None:
            write_result(given.out, question=__doc__.splitlines()[0], caveats=CAVEATS, body=body)
        json.dump(body, sys.stdout, indent=1)
        print()
    ranks.leave()


if __name__ == "__main__":
    main()
