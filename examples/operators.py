"""Operators of the registry: found in a model that spells them out, fused, and given an implementation of one's own.

    python examples/operators.py
"""

from __future__ import annotations

import torch
from torch import nn

import piecework as pw
from piecework import ops
from piecework.events import PassDone, Recorder


class Norm(nn.Module):
    """A norm as models write it: nothing here speaks of an operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        precise = rows.to(torch.float32)
        scaled = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(rows.dtype)


@pw.compilable(dynamic={"hidden": {0: "tokens"}})
class Block(nn.Module):
    """A gated feed-forward block between two sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Norm(32), Norm(32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self.first(hidden)
        return self.last(hidden + self.down(nn.functional.silu(self.gate(rows)) * self.up(rows)))


def counting_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """Compute a norm with torch's own, and say that this implementation ran.

    Tensors:
        x       [T, E]  model
        weight  [E]     model
        ->      [T, E]  model
    """
    print("  counting_norm ran")
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def main() -> None:
    """Compile one model with operators off, on, and with an implementation of our own."""
    torch.manual_seed(0)
    model, hidden = Block().eval(), torch.randn(5, 32)
    with torch.no_grad():
        wanted = model(hidden)
    for custom_ops in (("none",), ("all",), ("none", "+rms_norm")):
        if custom_ops == ("none", "+rms_norm"):
            ops.implement("rms_norm", "counting", {"rms_norm": counting_norm}, devices=("cpu",))
        seen = Recorder()
        options = pw.CompileOptions(compiler="eager", custom_ops=custom_ops, max_num_batched_tokens=64, verify=False)
        program = pw.compile(model, {"hidden": hidden}, options=options, store=pw.MemoryStore(), observer=seen)
        found = {done.name: done.matches for done in seen.of(PassDone) if done.matches}
        print(f"custom_ops {','.join(custom_ops)}: {found or 'nothing is looked for'}")
        with torch.no_grad():
            torch.testing.assert_close(program(hidden=hidden), wanted)
    print("each gives what the model gives")


if __name__ == "__main__":
    main()
