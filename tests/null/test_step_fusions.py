"""A turned key and its KV write: fused where nothing else reads the key, and where it is rounded as the write is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from piecework import ops
from piecework.ops import PagedCache, Step, step_context
from piecework.ops.choice import choose
from piecework.passes import apply_passes, resolve_passes
from piecework.passes.operators import operator_passes
from piecework.stages.trace import trace

TOKENS = 4


class Keys(nn.Module):
    """Turns keys, writes them with their values, and says what was written; `twist` changes one line."""

    def __init__(self, twist: str) -> None:
        super().__init__()
        self.twist = twist

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        turned = ops.rotary(x, cos, sin)
        if self.twist in ("rounded", "extra reader of rounded"):
            turned = turned.to(x.dtype)
        elif self.twist == "rounded twice":
            turned = turned.to(torch.float16).to(x.dtype)
        key = turned[0].transpose(0, 1)
        if self.twist == "other view":
            key = key.reshape(key.shape)[:, :, :]
        token = torch.ops.piecework.kv_update(key, value, "layers.0")
        return (token, turned * 2) if self.twist.startswith("extra reader") else (token, x * 2)


def inputs(dtype: torch.dtype, angles: torch.dtype) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(2)
    given = {"x": torch.randn(1, 2, TOKENS, 8, generator=source).to(dtype)}
    given["cos"], given["sin"] = (torch.randn(1, 1, TOKENS, 8, generator=source).to(angles) for _ in range(2))
    return given | {"value": torch.randn(TOKENS, 2, 8, generator=source).to(dtype)}


def cache_after(run: object, given: dict[str, Tensor]) -> Tensor:
    cache = PagedCache.allocate(1, 16, 2, 8, dtype=given["value"].dtype)
    step = Step.from_lists(
        slots=range(TOKENS), query_starts=[0, TOKENS], sequence_lengths=[TOKENS], page_table=[[0]],
        sites={"layers.0": cache},
    )  # fmt: skip
    with torch.no_grad(), step_context(step):
        run(**given)  # type: ignore[operator]
    return cache.pages.clone()


DYNAMIC = {"x": {2: "tokens"}, "cos": {2: "tokens"}, "sin": {2: "tokens"}, "value": {0: "tokens"}}


@pytest.mark.parametrize(
    ("twist", "angles", "fused", "reason"),
    [
        ("", torch.bfloat16, 1, ""),
        ("rounded", torch.float32, 1, ""),
        ("rounded twice", torch.float32, 0, "the turned key is rounded more than once"),
        ("extra reader", torch.bfloat16, 0, "reads the turned key too"),
        ("extra reader of rounded", torch.float32, 0, "reads the turned key too"),
        ("other view", torch.bfloat16, 0, ""),
    ],
)
def test_a_key_is_turned_in_its_write_where_that_is_the_same(
    twist: str, angles: torch.dtype, fused: int, reason: str
) -> None:
    module, given = Keys(twist).eval(), inputs(torch.bfloat16, angles)
    traced = trace(module, given, DYNAMIC)
    _, steps = apply_passes(traced, operator_passes(choose(("none", "+rotary_kv_update"), "cpu")))
    report = {step.report.name: step.report for step in steps}["fuse_rotary_kv_update"]
    assert len(report.matches) == fused
    assert reason in " / ".join(report.misses)
    options = pw.CompileOptions(
        compiler="eager", custom_ops=("none", "+rotary_kv_update"), max_num_batched_tokens=16, ranges=((1, 16),)
    )
    program = pw.compile(module, given, dynamic=DYNAMIC, options=options, store=pw.MemoryStore())
    assert torch.equal(cache_after(program, given), cache_after(module, given))


class Parallel(nn.Module):
    """A norm, and two linears whose results are gated: what a decoder layer is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        total = x + residual
        normed = self.weight * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5))
        return total + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


@pytest.mark.parametrize("partition", ["fx", "inductor"])
def test_merged_linears_and_operators_go_together(partition: str) -> None:
    torch.manual_seed(0)
    module = Parallel().eval()
    given = {name: torch.randn(5, 16) for name in ("x", "residual")}
    dynamic = {name: {0: "tokens"} for name in given}
    traced = trace(module, given, dynamic)
    passes = (*resolve_passes(("no_ops", "merge_linears_everywhere")), *operator_passes(choose(("all",), "cpu")))
    _, steps = apply_passes(traced, passes)
    counts = {step.report.name: len(step.report.matches) for step in steps}
    names = ("merge_linears_everywhere", "find_norms", "find_gates", "fuse_add_norm")
    assert [counts[name] for name in names] == [1, 1, 1, 1]
    with torch.no_grad():
        wanted, right = module(**given), module.double()(**{name: each.double() for name, each in given.items()})
    module.float()
    options = pw.CompileOptions(
        compiler="eager", partition=partition, passes=("no_ops", "merge_linears_everywhere"), custom_ops=("all",),
        max_num_batched_tokens=16, ranges=((1, 16),),
    )  # fmt: skip
    found = pw.compile(module, given, dynamic=dynamic, options=options, store=pw.MemoryStore())(**given)
    assert float((found - right).norm() / right.norm()) <= 2 * float((wanted - right).norm() / right.norm()) + 5e-7
    assert module.gate.weight.untyped_storage().data_ptr() == module.up.weight.untyped_storage().data_ptr()


class Positions(nn.Module):
    """Turns queries as most models write it, and quantises what comes out; `twist` changes one line."""

    def __init__(self, twist: str) -> None:
        super().__init__()
        self.twist = twist
        self.register_buffer("scale", torch.tensor(0.02, dtype=torch.bfloat16 if twist == "narrow scale" else None))
        self.register_buffer("rows", torch.full((1, 8), 0.02))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        half = 3 if self.twist == "uneven halves" else 4
        first, second = x[..., :half], x[..., half:]
        turned = torch.cat((-second, first), dim=-1)
        turned = turned.float() if self.twist == "cast inside" else turned
        bent = x * cos + turned * sin
        scale = self.rows if self.twist == "a scale a column" else self.scale
        row = bent if self.twist == "narrow quotient" else bent.float()
        quotient = row / scale
        quantised = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        extra = {"halves read": turned, "quotient read": quotient}.get(self.twist)
        return (quantised, bent) if extra is None else (quantised, bent, extra)


@pytest.mark.parametrize(
    ("twist", "rotary", "quants", "reason"),
    [
        ("", 1, 1, ""),
        ("uneven halves", 0, 1, ""),
        ("halves read", 0, 1, "`output` reads `turned` too"),
        ("cast inside", 0, 1, ""),
        ("quotient read", 1, 0, "`output` reads `quotient` too"),
        ("narrow quotient", 1, 0, "the quotient is taken in `bfloat16`"),
        ("narrow scale", 1, 0, "the scale is no float32 tensor"),
        ("a scale a column", 1, 1, ""),  # one row of scales is one number a column: broadcast as torch does
    ],
)
def test_positions_and_quantisations_with_another_reader_or_cast_are_left_alone(
    twist: str, rotary: int, quants: int, reason: str
) -> None:
    module, given = Positions(twist).eval(), inputs(torch.bfloat16, torch.bfloat16)
    del given["value"]
    given["cos"], given["sin"] = given["cos"][0], given["sin"][0]
    dynamic = {"x": {2: "tokens"}, "cos": {1: "tokens"}, "sin": {1: "tokens"}}
    traced = trace(module, given, dynamic)
    _, steps = apply_passes(traced, operator_passes(choose(("all",), "cpu")))
    reports = {step.report.name: step.report for step in steps}
    assert (len(reports["find_rotary"].matches), len(reports["find_quants"].matches)) == (rotary, quants)
    assert reason in " / ".join((*reports["find_rotary"].misses, *reports["find_quants"].misses))
    options = pw.CompileOptions(compiler="eager", custom_ops=("all",), max_num_batched_tokens=16, ranges=((1, 16),))
    program = pw.compile(module, given, dynamic=dynamic, options=options, store=pw.MemoryStore())
    with torch.no_grad():
        for one, other in zip(program(**given), module(**given), strict=True):
            assert torch.equal(one, other)
