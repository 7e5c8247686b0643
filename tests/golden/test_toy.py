"""The text of each value of a toy model: what a change of the line does to it is seen as a difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from piecework.seam.fx import format_call
from piecework.seam.names import registered_operators
from piecework.stages.split import resolve_split_ops, split
from piecework.stages.trace import trace
from piecework.stages.unique import unique
from piecework.values.graph import Plan, SplitGraph, TracedGraph
from piecework.values.shapes import Range

GOLDEN = Path(__file__).parent / "toy"


def attend(query: Tensor, key: Tensor, value: Tensor, out: Tensor, name: str) -> None:
    out.copy_(query + key.sum(0) * value.sum(0))


_library = torch.library.Library("golden", "FRAGMENT")
_library.define("attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, str name) -> ()")
_library.impl("attention", attend, "CPU")
torch.library.register_fake("golden::attention", lambda query, key, value, out, name: None, lib=_library)


class Layer(nn.Module):
    def __init__(self, name: str, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.name, self.epsilon = name, epsilon
        self.norm = nn.Parameter(torch.ones(8))
        self.qkv = nn.Linear(8, 24, bias=False)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor, cosine: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.norm
        query, key, value = (part.view(-1, 2, 4) for part in self.qkv(y).chunk(3, -1))
        query, key = query * cosine, key * cosine
        out = torch.empty_like(query)
        torch.ops.golden.attention(query, key, value, out, self.name)
        x = x + out.view(x.shape[0], -1)
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer(f"layers.{index}") for index in range(3))
        self.register_buffer("cosine", torch.rand(64, 1, 4), persistent=False)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        cosine = self.cosine[positions]
        for layer in self.layers:
            x = layer(x, cosine)
        return {"logits": self.head(x), "hidden": x}


DYNAMIC = {"ids": {0: "tokens"}, "positions": {0: "tokens"}}
EXAMPLE = (torch.arange(5), torch.arange(5))


@pytest.fixture(scope="module")
def traced() -> TracedGraph:
    assert "golden::attention" in registered_operators()
    return trace(Toy().eval(), EXAMPLE, DYNAMIC, bounds={"tokens": Range(1, 64)})


def show_traced(value: TracedGraph) -> str:
    lines = [f"{leaf.path}: {leaf.spec}" for leaf in value.inputs]
    lines += [
        f"{name}: {b.kind} `{b.name}` {b.spec} {' '.join(b.aliases)}".rstrip() for name, b in value.bindings.items()
    ]
    lines += [f"guard {guard.expression}" for guard in value.shape_guards]
    names = {node: node.name for node in value.graph.nodes}
    calls = [f"{node.name} = {format_call(node, names)}" for node in value.graph.nodes if node.op.startswith("call")]
    return "\n".join([*lines, "", *calls, f"return {value.graph.output_node().args[0]}", "", str(value.result)])


def show_split(value: SplitGraph) -> str:
    return "\n\n".join(
        f"{index} {stretch.kind}: {', '.join(n.name for n in stretch.inputs)}\n"
        f"    -> {', '.join(n.name for n in stretch.outputs)}\n    " + "\n    ".join(n.name for n in stretch.nodes)
        for index, stretch in enumerate(value.stretches)
    )


def show_plan(value: Plan) -> str:
    lines = [f"# piece {number}\n{text}" for number, text in enumerate(value.pieces)]
    for index, region in enumerate(value.regions):
        target = f"piece {region.piece}" if region.piece >= 0 else region.kind
        lines.append(f"# region {index}: {target}({', '.join(region.arguments)}) -> {', '.join(region.results)}")
        lines += [f"#     {call.results} = {call.operator}({call.arguments})" for call in region.calls]
    return "\n".join([*lines, f"# result {value.result}"])


def test_traced_split_and_plan(traced: TracedGraph, compare_golden: Callable[[Path, str], None]) -> None:
    compare_golden(GOLDEN / "1_traced.txt", show_traced(traced))
    cut = split(traced, resolve_split_ops((), ("golden::attention",)))
    compare_golden(GOLDEN / "2_split.txt", show_split(cut))
    compare_golden(GOLDEN / "3_plan.txt", show_plan(unique(cut)))


def test_program(compare_golden: Callable[[Path, str], None]) -> None:
    model = Toy().eval()
    options = pw.CompileOptions(
        compiler="eager", split_ops_only=("golden::attention",), ranges=((1, 64),), max_num_batched_tokens=64
    )
    program = pw.compile(model, EXAMPLE, dynamic=DYNAMIC, options=options, store=pw.MemoryStore())
    compare_golden(GOLDEN / "4_program.txt", program.source)
    ids = torch.arange(9)
    with torch.no_grad():
        expected = model(ids, ids)
    got = program(ids, ids)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
