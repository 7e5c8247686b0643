"""The sixteen architectures with operators: as many as they spell out, no cut more, and right by the tolerance rule."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from piecework import ops
from piecework.models.folder import KvSite
from piecework.models.hugging_face import LoadedModel, load_model
from piecework.ops import PagedCache, Step, step_context
from piecework.ops.choice import choose
from piecework.passes import apply_passes
from piecework.passes.operators import operator_passes
from piecework.stages.split import resolve_split_ops, split
from piecework.stages.trace import trace
from piecework.values.graph import OPAQUE, TracedGraph
from piecework.values.tolerance import allowed_error
from tiny_models import ARCHITECTURES, VOCABULARY, tiny_folder, tiny_model

LAYERS, TOKENS = 3, 12
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
# In three layers: norms (the last one included), gated activations, rotary positions of queries and keys, norms of
# sums, and, where each linear layer quantises its rows, norms and activations whose rows nobody else reads.
EXPECTED: dict[str, tuple[int, int, int, int, int]] = {
    "llama": (7, 3, 6, 6, 9),
    "mistral": (7, 3, 6, 6, 9),
    "qwen2": (7, 3, 6, 6, 9),
    "qwen3": (13, 3, 6, 6, 9),  # norms of queries and keys too
    "gemma": (7, 3, 6, 6, 9),
    "gemma2": (13, 3, 6, 6, 9),  # norms before and after
    "gemma3_text": (19, 3, 6, 6, 9),
    "gpt2": (0, 0, 0, 0, 0),  # norms of another kind, gates of none
    "gpt_neox": (0, 0, 6, 0, 0),
    "phi3": (7, 3, 6, 6, 9),
    "olmo2": (13, 3, 6, 1, 3),  # norms after, so that sums go to linear layers
    "smollm3": (7, 3, 4, 6, 9),  # one layer has no positions
    "granite": (7, 3, 6, 6, 9),
    "mixtral": (7, 3, 6, 6, 3),  # the router reads what experts read
    "qwen3_moe": (13, 3, 6, 6, 3),
    "gpt_oss": (7, 0, 6, 6, 3),  # its gate is clamped and bent in another way
}


@dataclass(frozen=True)
class Variant:
    """A traced model's graph under one choice of operators, and how often each pass matched."""

    traced: TracedGraph
    matches: dict[str, int]

    @property
    def cuts(self) -> tuple[int, int]:
        """The regions, and those of them that are opaque."""
        own = replace(self.traced, graph=copy.deepcopy(self.traced.graph))
        found = split(own, resolve_split_ops((), None)).stretches
        return len(found), sum(each.kind == OPAQUE for each in found)


def variants(loaded: LoadedModel, *choices: tuple[str, ...]) -> list[Variant]:
    """Trace a model once, and rewrite a copy of its graph for each choice."""
    traced = trace(loaded.model, loaded.example_inputs, loaded.dynamic)
    found = []
    for custom_ops in choices:
        passes = operator_passes(choose(custom_ops, "cpu"))
        graph, steps = apply_passes(replace(traced, graph=copy.deepcopy(traced.graph)), passes)
        found.append(Variant(graph, {step.report.name: len(step.report.matches) for step in steps}))
    return found


class Noting(fx.Interpreter):
    """Runs a graph, and keeps which experts each row is sent to: the indices of every top-k."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.routes: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if "topk" in str(n.target):
            self.routes.append(found[1].sort(-1).values)
        return found


def run(traced: TracedGraph, loaded: LoadedModel, arguments: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Run a traced graph as it stands; its first result are the logits. Return the experts of each layer too."""
    tensors = {**dict(loaded.model.named_parameters(remove_duplicate=False)), **dict(loaded.model.named_buffers())}
    tensors |= dict(traced.constants)
    sizes = {"tokens": arguments["input_ids"].shape[1], "rows": len(arguments.get("logits_to_keep", ()))}
    values = []
    for place in traced.graph.find_nodes(op="placeholder"):
        binding = traced.bindings[place.name]
        given = {"symbol": sizes, "input": arguments}.get(binding.kind, tensors)
        values.append(given[binding.name])
    noting = Noting(fx.GraphModule(nn.Module(), traced.graph))
    return noting.run(*values)[0], noting.routes


def routes_of(model: nn.Module) -> list[Tensor]:
    """Return a list that takes in, with each call of a model, the experts of each of its layers."""
    found: list[Tensor] = []
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(lambda module, given, result: found.append(result[-1].sort(-1).values))
    return found


def agreeing(*each: list[Tensor]) -> Tensor:
    """Mark the rows that go to the same experts in several runs: another expert is another function, no rounding."""
    layers = [torch.stack([(one != other).any(-1) for other in rest]).any(0) for one, *rest in zip(*each, strict=True)]
    return ~torch.stack(layers).any(0)


def logits_of(traced: TracedGraph, loaded: LoadedModel, ids: Tensor, routes: list[Tensor] | None = None) -> Tensor:
    """Run a prompt but for two tokens, then one a step; return all logits. `routes` takes in each layer's experts."""
    sites = {
        site.name: PagedCache.allocate(1, 16, site.num_kv_heads, site.head_dim, dtype=loaded.dtype)
        for site in loaded.sites
        if isinstance(site, KvSite)
    }
    found, experts = [], []
    for first, last in ((0, TOKENS - 2), (TOKENS - 2, TOKENS - 1), (TOKENS - 1, TOKENS)):
        step = Step.from_lists(
            slots=range(first, last), query_starts=[0, last - first], sequence_lengths=[last], page_table=[[0]],
            sites=sites,
        )  # fmt: skip
        arguments = {"input_ids": ids[None, first:last], "position_ids": torch.arange(first, last)[None]}
        if loaded.keeps_rows:
            arguments["logits_to_keep"] = torch.arange(last - first)
        with torch.no_grad(), step_context(step):
            logits, chosen = run(traced, loaded, arguments)
        found.append(logits[0])
        experts.append(chosen)
    if routes is not None:
        routes += [torch.cat(parts) for parts in zip(*experts, strict=True)]
    return torch.cat(found)


def slow_but_for(*fast: str) -> list[Any]:
    """Mark all architectures slow but for these."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


@pytest.mark.parametrize("architecture", slow_but_for("llama", "gemma2", "gpt_neox"))
def test_each_architecture_has_what_it_spells_out_and_stays_right(architecture: str, tmp_path: Path) -> None:
    loaded = load_model(tiny_folder(architecture, tmp_path), dtype=torch.bfloat16)
    # Off, then without what changes rounding, then with all there is.
    choices = (("none",), ("all", "-fused_add_rms_norm"), ("all", "+rotary_kv_update"))
    plain, exactly, whole = variants(loaded, *choices)
    norms, gates, rotary, sums, _ = EXPECTED[architecture]
    named = ("find_norms", "find_gates", "find_rotary", "fuse_add_norm", "fuse_rotary_kv_update")
    assert [whole.matches[name] for name in named] == [norms, gates, rotary, sums, rotary // 2]
    assert set(plain.matches.values()) == {0}
    assert plain.cuts == whole.cuts == (2 * LAYERS + 1, LAYERS)

    own, exact = tiny_model(architecture, dtype=torch.bfloat16), tiny_model(architecture, dtype=torch.bfloat16).double()
    if architecture in EXPERTS:
        exact.set_experts_implementation("eager")  # torch's grouped product knows no float64
    ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    routes: list[list[Tensor]] = [routes_of(exact), routes_of(own), [], []]
    with torch.no_grad():
        right = exact(input_ids=ids[None], use_cache=False).logits[0]
        eager = own(input_ids=ids[None], use_cache=False).logits[0]
    unfused, fused = (logits_of(v.traced, loaded, ids, r) for v, r in zip((plain, whole), routes[2:], strict=True))
    assert torch.equal(logits_of(exactly.traced, loaded, ids), unfused)
    assert len(routes[0]) == (LAYERS if architecture in EXPERTS else 0)
    rows = agreeing(*routes) if architecture in EXPERTS else torch.ones(TOKENS, dtype=torch.bool)
    assert rows.sum() >= TOKENS - 2, "more rows went to other experts than rounding explains"
    allowed = allowed_error(off(eager[rows], right[rows]), "bfloat16")
    assert off(unfused[rows], right[rows]) <= allowed
    assert off(fused[rows], right[rows]) <= allowed


def off(logits: Tensor, right: Tensor) -> float:
    return float((logits.double() - right).norm() / right.norm())


class Quantised(nn.Module):
    """A linear layer with weights of 8 bits, which quantises its rows: one scale a row, or a given one."""

    def __init__(self, linear: nn.Linear, scale: float | None) -> None:
        super().__init__()
        weight, factor = ops.quant_fp8(linear.weight)
        self.register_buffer("weight", weight)
        self.register_buffer("factor", factor)
        self.register_buffer("bias", linear.bias)
        if scale is not None:
            self.register_buffer("scale", torch.tensor(scale))

    def forward(self, rows: Tensor) -> Tensor:
        given = getattr(self, "scale", None)
        quantised, scale = ops.quant_fp8(rows, given, per_token=given is None)
        product = (quantised.float() * scale) @ (self.weight.float() * self.factor).T
        return (product if self.bias is None else product + self.bias).to(rows.dtype)


def quantise(loaded: LoadedModel, *, only: str = "", scale: float | None = None) -> None:
    """Put 8-bit layers in place of a model's linear ones, but for its head."""
    for name, module in list(loaded.model.named_modules()):
        if isinstance(module, nn.Linear) and "head" not in name and "embed_out" not in name and name.endswith(only):
            parent, _, last = name.rpartition(".")
            setattr(loaded.model.get_submodule(parent), last, Quantised(module, scale))


@pytest.mark.parametrize("architecture", slow_but_for("llama"))
def test_quantised_layers_take_norms_and_activations_in(architecture: str, tmp_path: Path) -> None:
    loaded = load_model(tiny_folder(architecture, tmp_path), dtype=torch.bfloat16)
    quantise(loaded)
    plain, fused = variants(loaded, ("none",), ("all", "+rotary_kv_update", "-fused_add_rms_norm"))
    assert fused.matches["fuse_quant"] == EXPECTED[architecture][4]
    assert plain.cuts == fused.cuts == (2 * LAYERS + 1, LAYERS)
    ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(logits_of(fused.traced, loaded, ids), logits_of(plain.traced, loaded, ids))


@pytest.mark.parametrize("scale", [0.01, pytest.param(None, marks=pytest.mark.slow)])
def test_attention_comes_out_quantised_where_one_number_is_the_scale(scale: float | None, tmp_path: Path) -> None:
    """A scale that the rows themselves ask for is not known before attention: nothing is fused then."""
    loaded = load_model(tiny_folder("llama", tmp_path), dtype=torch.bfloat16)
    quantise(loaded, only="o_proj", scale=scale)
    plain, fused = variants(loaded, ("none",), ("none", "+attention_quant_fp8"))
    assert fused.matches["fuse_attention_quant_fp8"] == (LAYERS if scale else 0)
    assert plain.cuts == fused.cuts == (2 * LAYERS + 1, LAYERS)
    ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(logits_of(fused.traced, loaded, ids), logits_of(plain.traced, loaded, ids))
