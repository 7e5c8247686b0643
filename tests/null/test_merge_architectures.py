"""The sixteen architectures and the real model with and without rewritten graphs, both judged against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import piecework as pw
from piecework.diagnostics.explain import explain_record
from piecework.diagnostics.explain_text import explain_lines
from piecework.engine.generate import allocate_caches, run_step
from piecework.store.protocol import PROGRAM
from piecework.values.difference import compare
from tiny_models import ARCHITECTURES, MERGED, NO_OPS, tiny_folder, tiny_model

PROMPT = list(range(5, 17))


def logits_of(folder: Path, passes: tuple[str, ...]) -> tuple[Tensor, dict[str, int]]:
    """Return the last row's logits of one step over the prompt, and how often each pass matched."""
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=16, ranges=((1, 16),), passes=passes)
    model = pw.LLM(folder, options=options, store=pw.MemoryStore()).model
    caches = allocate_caches(model.sites, num_pages=1, page_size=16, dtype=model.dtype)
    assert model.record is not None
    reports = {report["name"]: report["matches"] for report in model.record.notes.get("passes", ())}
    return run_step(model.step, PROMPT, 0, caches), reports


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rewritten_and_unrewritten_graphs_are_held_to_float64(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(architecture, tmp_path)
    plain, eager = tiny_model(architecture), tiny_model(architecture).double()
    if architecture in ("mixtral", "qwen3_moe", "gpt_oss"):
        eager.set_experts_implementation("eager")  # torch's grouped product knows no float64
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        wanted, exact = (m(input_ids=ids, use_cache=False).logits[0, -1] for m in (plain, eager))
    for passes in ((), ("no_ops",), ("merge_linears_everywhere",), ("no_ops", "merge_linears_everywhere")):
        found, matches = logits_of(folder, passes)
        difference = compare(f"{architecture} {passes}", found.to(wanted.dtype), wanted, exact)
        assert not difference.is_fault, difference.fault
        assert matches.get("merge_linears_everywhere", MERGED[architecture]) == MERGED[architecture]
        assert matches.get("no_ops", NO_OPS[architecture]) == NO_OPS[architecture]


def test_on_a_cpu_linears_are_left_alone_and_explain_says_why(tmp_path: Path) -> None:
    folder, store = tiny_folder("llama", tmp_path), pw.MemoryStore()
    records = {}
    for passes in ((), ("merge_linears",), ("merge_linears_everywhere",)):
        options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=16, ranges=((1, 16),), passes=passes)
        model = pw.LLM(folder, options=options, store=store).model
        assert model.record is not None
        records[passes] = model.record, explain_record("", model.record, store, store)
    plain, left, merged = records.values()
    (report,) = [each for each in left[1]["passes"] if each["name"] == "merge_linears"]
    assert report["matches"] == 0 and len(report["misses"]) == MERGED["llama"]
    assert report["misses"][0].endswith("q_proj + k_proj + v_proj: on a CPU one product is not faster than several")
    assert "on a CPU one product is not faster than several" in "\n".join(explain_lines(left[1]))
    assert [piece.text for piece in left[0].pieces] == [piece.text for piece in plain[0].pieces]
    assert [piece.text for piece in merged[0].pieces] != [piece.text for piece in plain[0].pieces]
    assert len(store.list_records(PROGRAM)) == 3, "each list of passes has a record of its own"
