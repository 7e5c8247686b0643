"""Rules from a checkpoint's names to a model's: renamed, tied either way, experts kept apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from piecework.models.conversion import weight_rules
from piecework.models.hugging_face import load_model
from piecework.models.weight_files import open_weights
from tiny_models import tiny_folder, tiny_model


def rewrite(folder: Path, change: object) -> None:
    file = folder / "model.safetensors"
    tensors = change(load_file(file))  # type: ignore[operator]
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "apart", "together"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w3.weight", "model.layers.0.mlp.experts.gate_up_proj"),
        ("qwen3_moe", "model.layers.2.mlp.experts.0.up_proj.weight", "model.layers.2.mlp.experts.gate_up_proj"),
    ],
)
def test_experts_kept_apart_are_joined(architecture: str, apart: str, together: str, tmp_path: Path) -> None:
    tiny_folder(architecture, tmp_path)
    assert apart in open_weights(tmp_path).names() and together not in open_weights(tmp_path).names()
    loaded = load_model(tmp_path)
    assert apart in json.dumps(loaded.rules[together])
    own = tiny_model(architecture).state_dict()
    assert all(torch.equal(loaded.model.state_dict()[name], tensor) for name, tensor in own.items())


def test_a_checkpoint_without_the_base_models_prefix(tmp_path: Path) -> None:
    tiny_folder("gpt2", tmp_path)
    rewrite(tmp_path, lambda held: {name.removeprefix("transformer."): tensor for name, tensor in held.items()})
    loaded = load_model(tmp_path)
    assert loaded.rules["transformer.h.0.attn.c_attn.weight"] == "h.0.attn.c_attn.weight"
    assert loaded.rules["lm_head.weight"] == "wte.weight"
    own = tiny_model("gpt2").state_dict()
    assert all(torch.equal(loaded.model.state_dict()[name], tensor) for name, tensor in own.items())


def test_ties_go_the_way_the_checkpoint_allows(tmp_path: Path) -> None:
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tiny_folder("gemma", tmp_path)
    assert load_model(tmp_path).rules == {head: embedding}
    assert weight_rules(load_model(tmp_path, with_weights=False).model.causal_lm[0]) == {head: embedding}

    rewrite(tmp_path, lambda held: {head if name == embedding else name: tensor for name, tensor in held.items()})
    turned = load_model(tmp_path)
    assert turned.rules == {embedding: head}
    assert turned.model.get_parameter(head) is turned.model.get_parameter(embedding)

    rewrite(tmp_path, lambda held: {**held, embedding: held[head].clone()})
    assert load_model(tmp_path).rules == {head: embedding}

    rewrite(tmp_path, lambda held: {**held, embedding: held[head] + 1})
    apart = load_model(tmp_path)
    assert apart.rules == {}
    assert torch.equal(apart.model.get_parameter(embedding), apart.model.get_parameter(head) + 1)


@pytest.mark.parametrize("architecture", ["gpt_neox", "mixtral", "qwen3_moe", "gemma"])
def test_a_build_without_weights_knows_the_names_they_will_have(architecture: str, tmp_path: Path) -> None:
    tiny_folder(architecture, tmp_path)
    with_files = load_model(tmp_path, with_weights=False).rules
    (tmp_path / "model.safetensors").unlink()
    assert load_model(tmp_path, with_weights=False).rules == with_files
