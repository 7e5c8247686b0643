"""Start twice: the second time nothing is compiled, and nothing of the compiler is even imported.

    python examples/warm_start.py FOLDER     # once: traces and compiles into FOLDER
    python examples/warm_start.py FOLDER     # again: finds all of it there

The second start holds itself to it: `pw.no_compile()` makes any compile in the process, in any thread, an error.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from torch import nn

import piecework as pw
from piecework.events import ArtifactCompiled, ArtifactLoaded, Phase, Recorder, RecordHit

COMPILER = ("torch._dynamo", "torch._inductor", "sympy")


@pw.compilable(dynamic={"hidden": {0: "tokens"}})
class Stack(nn.Module):
    """Some layers of a norm and a gated product."""

    def __init__(self, layers: int = 6, width: int = 16) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for gate, norm in zip(self.gates, self.norms, strict=True):
            left, right = gate(norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + left.sigmoid() * right
        return hidden


def main() -> None:
    """Start once from the folder that is named."""
    if len(sys.argv) < 2:
        sys.exit("say where the store is to be: python examples/warm_start.py FOLDER [COMPILER]")
    folder = Path(sys.argv[1])
    is_warm = any(folder.rglob("*.record"))
    torch.manual_seed(0)
    model = Stack().eval()
    options = pw.CompileOptions(compiler=sys.argv[2] if len(sys.argv) > 2 else "inductor", max_num_batched_tokens=64)
    seen = Recorder()
    with torch.no_grad(), pw.no_compile() if is_warm else contextlib.nullcontext():
        program = pw.compile(model, (torch.randn(5, 16),), options=options, store=pw.DiskStore(folder), observer=seen)
        hidden = torch.randn(9, 16)
        assert torch.allclose(program(hidden), model(hidden), atol=1e-5)
    phases = {phase.name for phase in seen.of(Phase)}
    print(f"record found: {'yes' if seen.of(RecordHit) else 'no'}, traced: {'yes' if 'trace' in phases else 'no'}")
    print(f"compiled {len(seen.of(ArtifactCompiled))}, loaded {len(seen.of(ArtifactLoaded))}")
    print(f"imported of the compiler: {', '.join(name for name in COMPILER if name in sys.modules) or 'nothing'}")


if __name__ == "__main__":
    main()
