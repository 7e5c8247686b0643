"""A model with its weights whose opaque bodies need a step: traced outside any step, right inside one."""

from __future__ import annotations

from pathlib import Path

import torch

import piecework as pw
from piecework.engine.generate import generate
from piecework.models.hugging_face import load_model
from piecework.seam.shadow import fake_of
from tiny_models import tiny_folder


def test_a_model_with_weights_is_traced_outside_a_step(tmp_path: Path) -> None:
    loaded = load_model(tiny_folder("llama", tmp_path / "model"))
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, ranges=((1, 64),))
    program = pw.compile(
        loaded.model, loaded.example_inputs, dynamic=loaded.dynamic, options=options, store=pw.MemoryStore()
    )

    def tokens(step: object) -> list[int]:
        answer = generate(step, [3, 1, 4, 1, 5], sites=loaded.sites, dtype=torch.float32, max_tokens=8)  # type: ignore[arg-type]
        return answer.token_ids

    assert tokens(program) == tokens(loaded.model)


def test_an_operator_without_a_fake_has_none() -> None:
    assert fake_of("piecework::kv_update") is not None
    assert fake_of("nobody::nothing") is None
