"""All passes and operators at once under Inductor, on tiny models and the real one, held to float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.real_model import real_model
from torch import Tensor

import piecework as pw
from piecework.engine.generate import allocate_caches, run_step
from piecework.events import FallBack, PassDone, Recorder, VerificationFailed
from piecework.values.difference import compare
from tiny_models import MERGED, tiny_folder, tiny_model

PROMPT = list(range(5, 17))
EVERYTHING = ("all", "+rotary_kv_update")


@pw.graph_pass("count_products", version=1, runs_on="piece")
def count_products(piece: Any) -> Any:
    """Write each negation as a product, and count products of matrices."""
    found = []
    for node in list(piece.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.mm.default:
            found.append(node.name)
        if node.op == "call_function" and node.target is torch.ops.aten.neg.default:
            with piece.graph.inserting_before(node):
                made = piece.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], -1))
                made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
            piece.graph.erase_node(node)
            found.append(made.name)
    return pw.Rewritten(piece, tuple(found))


def run(
    folder: Path, prompts: list[list[int]], *, partition: str = "fx", **options: Any
) -> tuple[Tensor, dict[str, int]]:
    """Return the last row's logits of a step over each prompt, and how often each pass matched."""
    watch, store = Recorder(), pw.MemoryStore()
    settings = pw.CompileOptions(
        partition=partition, max_num_batched_tokens=16, ranges=((2, 16),), size_one=False, **options
    )
    model = pw.LLM(folder, options=settings, store=store, observer=watch).model
    assert watch.of(FallBack) == watch.of(VerificationFailed) == []
    matches: dict[str, int] = {}
    for done in watch.of(PassDone):
        matches[done.name] = matches.get(done.name, 0) + done.matches
    rows = []
    for prompt in prompts:
        caches = allocate_caches(model.sites, num_pages=1, page_size=16, dtype=model.dtype)
        rows.append(run_step(model.step, prompt, 0, caches))
    return torch.stack(rows), matches


def references(model: Any, prompts: list[list[int]]) -> Tensor:
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([each]), use_cache=False).logits[0, -1] for each in prompts])


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "partition"), [("llama", "fx"), ("qwen3", "inductor")])
def test_passes_and_operators_together_are_right(architecture: str, partition: str, tmp_path: Path) -> None:
    folder = tiny_folder(architecture, tmp_path)
    wanted = references(tiny_model(architecture), [PROMPT])
    right = references(tiny_model(architecture).double(), [PROMPT])
    passes = ("no_ops", "merge_linears_everywhere", count_products)
    found, matches = run(folder, [PROMPT], partition=partition, passes=passes, custom_ops=EVERYTHING)
    assert matches["merge_linears_everywhere"] == MERGED[architecture]
    assert matches["fuse_rotary_kv_update"] == 3 and matches["find_gates"] == 3
    # A piece a layer but for the last and the first, or the whole graph at once: products are counted where they are.
    assert matches["count_products"] == (9 if partition == "fx" else 13)
    difference = compare(architecture, found, wanted, right)
    assert not difference.is_fault, difference.fault


@pytest.mark.slow
def test_the_real_model_is_right_with_every_pass_and_operator() -> None:
    """Several prompts are judged together: of one row alone, eager's own error may be small by chance."""
    from transformers import AutoModelForCausalLM

    folder, source = real_model(), torch.Generator().manual_seed(3)
    plain, exact = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for dtype in (torch.float32, torch.float64)
    )
    prompts = [torch.randint(20, 40000, (n,), generator=source).tolist() for n in (3, 6, 9, 12, 16, 16, 14)]
    passes = ("no_ops", "merge_linears_everywhere", count_products)
    found, matches = run(folder, prompts, passes=passes, custom_ops=EVERYTHING)
    assert matches["merge_linears_everywhere"] == 2 * 30
    assert (matches["find_norms"], matches["find_gates"], matches["fuse_add_norm"]) == (61, 30, 60)
    assert (matches["find_rotary"], matches["fuse_rotary_kv_update"]) == (60, 30)
    difference = compare("SmolLM2", found, *(references(model, prompts) for model in (plain, exact)))
    assert not difference.is_fault, difference.fault
