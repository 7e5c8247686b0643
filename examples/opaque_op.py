"""An operator of one's own, which no compiler looks into: first one that computes, then one that writes.

    python examples/opaque_op.py

An operator needs three things beside its body: a schema, which says what it writes; a fake, which says what its result
looks like without computing it; and, to be cut at, `pw.split_op`. `torch.library.opcheck` holds them to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import piecework as pw
from piecework.events import Recorder, SplitDone

# The library object keeps the operators alive. `torch.library.custom_op` would do too, but its first call imports the
# whole compiler, which a warm start can do without.
library = torch.library.Library("example", "DEF")
library.define("soft_cap(Tensor scores, float cap) -> Tensor")
library.define("append(Tensor(a!) cache, Tensor rows, Tensor slots) -> ()")


@pw.split_op("example::soft_cap")
def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Press scores into (-cap, cap).

    Tensors:
        scores  [T, E]  model
        ->      [T, E]  model
    """
    return torch.tanh(scores / cap) * cap


@pw.split_op("example::append", writes="cache")
def append(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write each row to its slot of the cache.

    Tensors:
        cache  [S, E]  model  MUTATED in place; S slots
        rows   [T, E]  model
        slots  [T]     i64    where each row goes
    """
    cache.index_copy_(0, slots, rows)


library.impl("soft_cap", soft_cap, "CompositeExplicitAutograd")
library.impl("append", append, "CompositeExplicitAutograd")


@torch.library.register_fake("example::soft_cap", lib=library)
def _soft_cap_fake(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.empty_like(scores)


@torch.library.register_fake("example::append", lib=library)
def _append_fake(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    return None


@pw.compilable(dynamic={"hidden": {0: "tokens"}})
class Capped(nn.Module):
    """Project, cap, project back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.ops.example.soft_cap(self.up(hidden) * 2, 3.0)
        return self.down(scores) + hidden


@pw.compilable(dynamic={"hidden": {0: "tokens"}, "slots": {0: "tokens"}})
class Remembering(nn.Module):
    """Write each token's projection to a cache that the caller owns, and read the whole cache back."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        torch.ops.example.append(cache, self.key(hidden), slots)
        return hidden @ cache.T.softmax(0)


class Inspector:
    """A compiler that compiles nothing: it notes what it is given, and lets the graph run as it is."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call_")])
        return graph.forward


def main() -> None:
    """Check both operators, show each as one node of one graph, then cut there."""
    torch.manual_seed(0)
    hidden, cache, slots = torch.randn(5, 8), torch.zeros(16, 8), torch.tensor([3, 1, 4, 15, 9])
    torch.library.opcheck(torch.ops.example.soft_cap.default, (hidden, 3.0))
    torch.library.opcheck(torch.ops.example.append.default, (cache.clone(), hidden, slots))
    print("opcheck: both operators do what their schemas and fakes say")
    show(Capped().eval(), {"hidden": hidden})
    show(Remembering().eval(), {"hidden": hidden, "cache": cache, "slots": slots})


def show(model: nn.Module, arguments: dict[str, torch.Tensor]) -> None:
    """Compile a model whole and in pieces, and compare both with the model itself."""
    inspector, seen = Inspector(), Recorder()
    whole = pw.CompileOptions(mode="trace_once", compiler=inspector, max_num_batched_tokens=64, size_one=False)
    cut = pw.CompileOptions(mode="piecewise", compiler="eager", max_num_batched_tokens=64)
    programs = [
        pw.compile(model, arguments, options=whole, store=pw.MemoryStore()),
        pw.compile(model, arguments, options=cut, store=pw.MemoryStore(), observer=seen),
    ]
    (graph,) = inspector.graphs
    (node,) = [target for target in graph if target.startswith("example.")]
    print(f"{type(model).__name__}: one graph of {len(graph)} operations, `{node}` is one of them")
    (split,) = seen.of(SplitDone)
    print(f"{type(model).__name__}: cut there into {split.regions} regions, {split.opaque} of them opaque")
    with torch.no_grad():
        expected, wanted = fresh(arguments), None
        wanted = model(**expected)
        for program in programs:
            given = fresh(arguments)
            assert torch.allclose(program(**given), wanted, atol=1e-6)
            assert all(torch.equal(given[name], expected[name]) for name in given), (
                "what it writes is part of the result"
            )
    print(f"{type(model).__name__}: both give what the model gives")


def fresh(arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the arguments, since a call may write to them."""
    return {name: value.clone() for name, value in arguments.items()}


if __name__ == "__main__":
    main()
