"""Hugging Face models on a GPU: every piece compiles, and what they say is what Transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny_models import ARCHITECTURES, tiny_folder, tiny_model

import piecework as pw
from piecework.engine.generate import allocate_caches, run_step
from piecework.events import FallBack, Recorder, Verified
from piecework.values.difference import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
OPTIONS = pw.CompileOptions(max_num_batched_tokens=64, ranges=((2, 64),), size_one=False)
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_agrees_with_transformers(architecture: str, tmp_path: Path) -> None:
    folder, watch = tiny_folder(architecture, tmp_path), Recorder()
    plain, exact = tiny_model(architecture).cuda(), tiny_model(architecture).double().cuda()
    if architecture in EXPERTS:
        for model in (plain, exact):
            model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    opened = pw.LLM(folder, device="cuda", options=OPTIONS, store=pw.MemoryStore(), observer=watch).model
    assert [fallen.reason for fallen in watch.of(FallBack)] == []
    assert {e.outcome for e in watch.of(Verified)} == {"held"}
    rows: list[tuple[torch.Tensor, ...]] = []
    for count in (2, 12, 33):
        prompt = [5 + 7 * n % 80 for n in range(count)]
        with torch.no_grad():
            ids = torch.tensor([prompt], device="cuda")
            wanted, right = (model(input_ids=ids, use_cache=False).logits[0, -1] for model in (plain, exact))
        caches = allocate_caches(opened.sites, num_pages=1, page_size=64, dtype=opened.dtype, device="cuda")
        rows.append((run_step(opened.step, prompt, 0, caches, "cuda"), wanted, right))
    # All sizes are judged together: rounding of the few logits of one row is off by twice another's now and then.
    difference = compare(architecture, *(torch.stack(each).cpu() for each in zip(*rows, strict=True)))
    assert not difference.is_fault, difference.fault
