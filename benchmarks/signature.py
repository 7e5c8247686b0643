"""What does the check of a call's arguments cost, for four tensors?

    .venv/bin/python benchmarks/signature.py

The bar: at most 2.5 µs a call on a machine where the yardstick takes 1.2 ms, and in proportion elsewhere.

A program is compiled by the eager compiler from a module that takes four tensors, two of token ids and positions and
two of activations, which share one dynamic dimension. Its check is then made anew around a run that does nothing, so
that a timed call is the generated check, the choice of the range and the hand-over, and no work. The cost of calling
the same empty function with the same arguments is given beside it, and not taken off.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
from torch import nn

import piecework as pw
from measure import machine, time_calls, write_result, yardstick_ms
from piecework.runtime.signature import compile_check

HERE = pathlib.Path(__file__).resolve().parent
BAR_US, YARDSTICK_MS = 2.5, 1.2
CAVEATS = (
    "Least of many short blocks: what the check costs when nothing interrupts it.",
    "Under `torch.no_grad()`, as engines call; with gradients enabled a call enters and leaves `no_grad` besides.",
)


class FourTensors(nn.Module):
    """Take four tensors over one dimension of tokens."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, heads: torch.Tensor
    ) -> torch.Tensor:
        """Add all up, so that each input is read.

        Tensors:
            input_ids, positions  [T]        i64
            hidden                [T, E]     model
            heads                 [T, H, D]  model
            ->                    [T, E]     model
        """
        return hidden + heads.flatten(1) + input_ids.unsqueeze(1) + positions.unsqueeze(1)


def main() -> None:
    """Time the check at a few sizes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=500)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "signature.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check, source = make_check()
    inputs = example(7)
    rows = []
    with torch.no_grad():
        for _ in range(3):
            before = yardstick_ms()
            checked = time_calls(lambda: check(*inputs), blocks=arguments.blocks)
            empty = time_calls(lambda: _nothing(*inputs), blocks=arguments.blocks // 4)
            yardstick = min(before, yardstick_ms())
            rows.append({"check_us": checked.least_us, "empty_us": empty.least_us, "yardstick_ms": yardstick})
    ratios = [row["check_us"] / (BAR_US * row["yardstick_ms"] / YARDSTICK_MS) for row in rows]
    body = {"bar_us": BAR_US, "of_the_bar": round(min(ratios), 3), "rows": rows, "source": source}
    write_result(arguments.output, question="Cost of the signature check for four tensors", caveats=CAVEATS, body=body)
    print(json.dumps({"load": machine()["load"], "rows": rows}, indent=1))
    print(f"{min(ratios):.2f} of the bar")


def make_check():
    """Return the check of a compiled program around a run that does nothing, and its source."""
    tokens = {0: pw.Dim("tokens")}
    program = pw.compile(
        FourTensors(), example(5), store=pw.MemoryStore(), options=pw.CompileOptions(compiler="eager"),
        dynamic={"input_ids": tokens, "positions": tokens, "hidden": tokens, "heads": tokens},
    )  # fmt: skip
    bound = program.bound
    return compile_check(bound.leaves, bound.checked, [_nothing] * len(bound.runs))


def example(num_tokens: int) -> tuple[torch.Tensor, ...]:
    """Return four tensors of `num_tokens` rows."""
    ids = torch.arange(num_tokens)
    return ids, ids.clone(), torch.randn(num_tokens, 32), torch.randn(num_tokens, 4, 8)


def _nothing(*values: object) -> None:
    return None


if __name__ == "__main__":
    main()
