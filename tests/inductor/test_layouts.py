"""What leaves a compiled piece lies as the model lays it out, at every size: the next region was promised that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from piecework.events import FallBack, Recorder, Verified
from piecework.values.declaration import split_op
from piecework.values.difference import stride_of

HEADS, WIDTH = 4, 8
SIZES = (1, 2, 3, 17)
seen: list[list[Tensor]] = []

_library = torch.library.Library("layouts_test", "FRAGMENT")
_library.define("look(Tensor[] values, Tensor x) -> Tensor")


@split_op("layouts_test::look")
def look(values: list[Tensor], x: Tensor) -> Tensor:
    """Keep what was handed over, and read it as a kernel does that trusts its strides.

    Tensors:
        values  any     any
        x       [T, E]  f32
        ->      [T, E]  f32
    """
    seen.append(list(values))
    return x * 2


_library.impl("look", look, "CompositeExplicitAutograd")
torch.library.register_fake("layouts_test::look", lambda values, x: torch.empty_like(x), lib=_library)


def rotated(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


Kind = Callable[["Layouts", Tensor, Tensor], Tensor]  # of the rows, and of them by heads: [1, H, T, D / H]
KINDS: dict[str, Kind] = {
    "cat with an empty part": lambda m, x, h: torch.cat((h * 2 + rotated(h), h[..., WIDTH:]), -1),
    "cat with an empty part in front": lambda m, x, h: torch.cat((h[..., WIDTH:], h.sin()), -1),
    "cat with no rows": lambda m, x, h: torch.cat((h[:, :0], h.cos()), 1),
    "cat of one": lambda m, x, h: torch.cat((h + 3,), -1),
    "cat of one twice": lambda m, x, h: torch.cat((h, h), -1) * 1,
    "cat that changes dtype": lambda m, x, h: torch.cat((h.exp(), h[..., WIDTH:].double()), -1),
    "cat of other strides": lambda m, x, h: torch.cat((x.t() + 1, x.t()[:0] * 2), 0),
    "partial rotary": lambda m, x, h: torch.cat((h[..., :4] * 3 + rotated(h[..., :4]), h[..., 4:]), -1),
    "a part of a cat": lambda m, x, h: torch.cat((h.tanh(), h[..., WIDTH:]), -1)[..., 2:6],
    "reshaped cat": lambda m, x, h: torch.cat((h.abs(), h[..., WIDTH:]), -1).reshape(HEADS, -1),
    "made like a cat": lambda m, x, h: torch.full_like(torch.cat((h.neg(), h[..., WIDTH:]), -1), 2.0),
    "expanded": lambda m, x, h: (x[:, :1] + 5).expand(-1, 6),
    "expanded in front": lambda m, x, h: (h[0] - 5).unsqueeze(0).expand(3, -1, -1, -1),
    "expanded and turned": lambda m, x, h: (h[0, :, :, :1] - 6).expand(-1, -1, 5).transpose(0, 1),
    "expanded to the rows": lambda m, x, h: (x[:1] * 1.5).expand(x.shape[0], -1),
    "a part": lambda m, x, h: (x + 3)[:, 2:6],
    "a part of what is turned": lambda m, x, h: (x * 4).t()[1:5],
    "every other": lambda m, x, h: (h + 4)[:, ::2, :, 1::3],
    "windows": lambda m, x, h: (x - 3).unfold(1, 4, 2),
    "a dimension of one": lambda m, x, h: (x + 6).unsqueeze(1).transpose(0, 1),
    "a dimension of one in the middle": lambda m, x, h: (x * 7).view(-1, 1, WIDTH * HEADS).permute(2, 1, 0),
    "transposed": lambda m, x, h: (x + 7).t(),
    "transposed product": lambda m, x, h: (m.weight @ x.t()).t(),
    "channels last": lambda m, x, h: (x + 8).view(-1, 2, 4, 4).contiguous(memory_format=torch.channels_last),
    "after channels last": lambda m, x, h: (x - 8).view(-1, 2, 4, 4).to(memory_format=torch.channels_last).relu() + 1,
    "softmax of heads": lambda m, x, h: h.softmax(-1),
    "norm of heads": lambda m, x, h: torch.nn.functional.layer_norm(h, (WIDTH,)),
    "a choice": lambda m, x, h: torch.where(h > 0, h, h.new_zeros(1)),
    "a stack": lambda m, x, h: torch.stack((h, h * 2), 0)[0],
    "padded": lambda m, x, h: torch.nn.functional.pad(h, (0, 0)),
    "repeated": lambda m, x, h: (h + 9).repeat(1, 1, 1, 1),
    "view of an input": lambda m, x, h: x[:, 3:7],
    "transposed input": lambda m, x, h: x.t(),
    "the input": lambda m, x, h: x,
    "transposed weight": lambda m, x, h: m.weight.t(),
    "part of a weight": lambda m, x, h: m.weight[2:5],
    "nothing": lambda m, x, h: h[..., WIDTH:] + 1,
}  # fmt: skip


# What the compiler lays out in its own way unless it is told; the others hold by themselves.
MOVED = (
    "cat with an empty part", "cat of one", "a part of a cat", "made like a cat", "expanded in front", "a part",
    "every other", "windows", "padded",
)  # fmt: skip


class Layouts(nn.Module):
    """Hands one value of each kind to an opaque operator, and reads them all again behind it."""

    weight: Tensor

    def __init__(self, names: tuple[str, ...] = tuple(KINDS)) -> None:
        super().__init__()
        self.kinds = [KINDS[name] for name in names]
        source = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.rand(6, HEADS * WIDTH, generator=source), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * 0.5).view(1, -1, HEADS, WIDTH).transpose(1, 2)
        values = [make(self, x, heads) for make in self.kinds]
        y = torch.ops.layouts_test.look(values, x + 1)
        total = y.mean()
        for value in values:
            weights = torch.arange(value.numel()).view(value.shape) % 5
            total = total + (value * weights).sum() / (value.numel() + 1)
        found: Tensor = y + total
        return found


@pytest.mark.parametrize(
    ("partition", "names"),
    [
        ("fx", MOVED),
        pytest.param("fx", tuple(KINDS), marks=pytest.mark.slow),
        pytest.param("inductor", tuple(KINDS), marks=pytest.mark.slow),
    ],
    ids=["moved", "fx", "inductor"],
)
def test_every_kind_of_layout_crosses_a_cut_as_the_model_made_it(partition: str, names: tuple[str, ...]) -> None:
    model, watch = Layouts(names).eval(), Recorder()
    options = pw.CompileOptions(
        compiler="inductor", partition=partition, ranges=((1, 32),), max_num_batched_tokens=32, passes=()
    )
    program = pw.compile(
        model, (torch.rand(4, HEADS * WIDTH),), dynamic={"x": {0: "tokens"}}, options=options, store=pw.MemoryStore(),
        observer=watch,
    )  # fmt: skip
    assert [fallen.reason for fallen in watch.of(FallBack)] == []
    assert {each.outcome for each in watch.of(Verified)} == {"held"}
    for size in SIZES:
        x = torch.rand(size, HEADS * WIDTH, generator=torch.Generator().manual_seed(size))
        seen.clear()
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-4)
        got, wanted = seen
        for name, one, other in zip(names, got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=f"{name} at {size}")
            assert not other.numel() or stride_of(one) == stride_of(other), f"{name} at {size}"


@pw.graph_pass("turned", version=1, runs_on="piece")
def turned(piece: Any) -> Any:
    """Write each sine of a matrix as the transpose of a sine of its transpose: other strides, the same numbers."""
    aten, found = torch.ops.aten, []
    for node in list(piece.graph.nodes):
        if node.op == "call_function" and node.target is aten.sin.default:
            with piece.graph.inserting_before(node):
                across = piece.graph.call_function(aten.permute.default, (node.args[0], [1, 0]))
                flat = piece.graph.call_function(
                    aten.clone.default, (across,), {"memory_format": torch.contiguous_format}
                )
                made = piece.graph.call_function(aten.sin.default, (flat,))
                back = piece.graph.call_function(aten.permute.default, (made, [1, 0]))
            node.replace_all_uses_with(back)
            piece.graph.erase_node(node)
            found.append(back.name)
    return pw.Rewritten(piece, tuple(found))


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = (x + 1).sin()
        found: Tensor = torch.ops.layouts_test.look([y], y) + y
        return found


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_pass_that_turns_what_crosses_a_cut_turns_nothing_behind_it(compiler: str) -> None:
    model, watch = Sine().eval(), Recorder()
    options = pw.CompileOptions(
        compiler=compiler, ranges=((2, 32),), size_one=False, max_num_batched_tokens=32, passes=(turned,)
    )
    program = pw.compile(
        model, (torch.rand(4, 6),), dynamic={"x": {0: "tokens"}}, options=options, store=pw.MemoryStore(),
        observer=watch,
    )  # fmt: skip
    assert watch.of(FallBack) == []
    x = torch.rand(5, 6)
    seen.clear()
    torch.testing.assert_close(program(x), model(x))
    assert [values[0].stride() for values in seen] == [(6, 1), (6, 1)]
