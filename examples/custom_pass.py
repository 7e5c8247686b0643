"""A graph pass of one's own: what it found, what it changed, and what happens when it breaks the graph.

    python examples/custom_pass.py

A pass is handed the whole traced graph and returns it with a line for each match. Its result is computed anew on fakes,
linted and compared; a pass that changes what the model gives, or leaves a graph that does not run, is named.
"""

from __future__ import annotations

import torch
from torch import nn

import piecework as pw
from piecework.errors import PassError
from piecework.events import PassDone, Recorder


@pw.graph_pass("square_as_product", version=1, expects_match=True)
def square_as_product(traced):  # type: ignore[no-untyped-def]
    """Write `x.pow(2)` as `x * x`."""
    found = []
    for node in list(traced.graph.nodes):
        if node.op == "call_method" and node.target == "pow" and node.args[1] == 2:
            with traced.graph.inserting_before(node):
                product = traced.graph.call_method("mul", (node.args[0], node.args[0]))
            node.replace_all_uses_with(product)
            traced.graph.erase_node(node)
            found.append(node.name)
    return pw.Rewritten(traced, tuple(found))


@pw.graph_pass("half_result", version=1)
def half_result(traced):  # type: ignore[no-untyped-def]
    """Give the model's first result in another dtype, which no caller was told of."""
    output = traced.graph.output_node()
    with traced.graph.inserting_before(output):
        output.args = ((traced.graph.call_method("half", (output.args[0][0],)), *output.args[0][1:]),)
    return pw.Rewritten(traced)


@pw.compilable(dynamic={"x": {0: "tokens"}})
class Energy(nn.Module):
    """A sum of squares over a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).pow(2).sum(-1)


def main() -> None:
    """Compile with a pass that is right, then with one that is not."""
    torch.manual_seed(0)
    model, x, seen = Energy().eval(), torch.randn(5, 8), Recorder()
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, passes=(square_as_product,))
    program = pw.compile(model, {"x": x}, options=options, store=pw.MemoryStore(), observer=seen)
    for done in seen.of(PassDone):
        print(f"{done.name}, version {done.version}: {done.matches} match")
    with torch.no_grad():
        torch.testing.assert_close(program(x=x), model(x))
    print("it gives what the model gives")
    wrong = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, passes=(half_result,))
    try:
        pw.compile(model, {"x": x}, options=wrong, store=pw.MemoryStore())
    except PassError as error:
        print(f"refused: {error.message}")


if __name__ == "__main__":
    main()
