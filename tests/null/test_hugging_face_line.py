"""The sixteen architectures down the whole line, eager compiler: seven regions, and Transformers' own tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import piecework as pw
from piecework.events import ArtifactCompiled, FallBack, Recorder, SplitDone
from piecework.values.tolerance import decisive_margin
from tiny_models import ARCHITECTURES, WINDOW, tiny_folder, tiny_model

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
PROMPT = list(range(5, 25))
OPTIONS = pw.CompileOptions(compiler="eager", max_num_batched_tokens=16, ranges=((1, 16),))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_is_cut_at_its_layers_and_generates_the_same(architecture: str, tmp_path: Path) -> None:
    """The prompt is longer than the windows and than a step: it goes in two chunks."""
    assert len(PROMPT) > OPTIONS.max_num_batched_tokens > WINDOW
    folder = tiny_folder(architecture, tmp_path)
    store, cold, warm = pw.MemoryStore(), Recorder(), Recorder()
    model = pw.LLM(folder, options=OPTIONS, store=store, observer=cold)
    (split,) = cold.of(SplitDone)
    assert (split.regions, split.opaque, split.sites) == (7, 3, 4)
    assert split.distinct == (4 if architecture == "smollm3" else 3)  # every other layer of it has no rotary positions
    assert cold.of(FallBack) == []
    (answer,) = model.generate(PROMPT, max_tokens=10, ignore_eos=True)

    reference, exact = tiny_model(architecture), tiny_model(architecture).double()
    if architecture in EXPERTS:
        exact.set_experts_implementation("eager")  # torch's grouped product knows no float64
    eager_error = 0.0
    ids = list(PROMPT)
    for token in answer.generation.tokens:
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            right = exact(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        eager_error = max(eager_error, float((logits - right).norm() / right.norm()))
        if token.margin <= decisive_margin(float(right.norm()), "float32", eager_error):
            break
        assert token.token_id == int(logits.argmax())
        ids.append(token.token_id)
    assert len(ids) > len(PROMPT), "no token was decided"

    again = pw.LLM(folder, options=OPTIONS, store=store, observer=warm)
    assert warm.of(ArtifactCompiled) == []
    assert again.generate(PROMPT, max_tokens=10, ignore_eos=True)[0].token_ids == answer.token_ids
