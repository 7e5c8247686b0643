"""Model folders and models that are not served: each refused by name, with a hint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from piecework.errors import BindError, ModelError, OptionError
from piecework.models.hugging_face import load_model
from piecework.models.skeleton import build_skeleton, find_sites
from tiny_models import ARCHITECTURES, VOCABULARY, tiny_config, tiny_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"llama": tiny_folder("llama", tmp_path_factory.mktemp("llama"))}


def edited(folder: Path, target: Path, **changed: Any) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changed}))
    return target


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised (`gptq`), which is not served"),
        (
            {"model_type": "of_my_own", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
            "brings its own code for `of_my_own` (`trust_remote_code`)",
        ),
        ({"model_type": "newer_than_this"}, "Transformers cannot read the configuration"),
        ({"model_type": 3}, "has no `model_type`"),
        ({"layer_types": ["linear_attention"] * 3}, "has layers of type `linear_attention`"),
    ],
)
def test_refusals_are_by_name(changed: dict[str, Any], text: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(edited(folders["llama"], tmp_path / "m", **changed))
    assert text in str(caught.value)
    assert "\nhint: " in str(caught.value)


def test_adapters_and_bad_folders_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model folder at"):
        load_model(tmp_path / "none")
    with pytest.raises(ModelError, match="there is no `config.json`"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list, not an object"):
        load_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is an adapter \(LoRA or alike\)"):
        load_model(tmp_path)
    for device in ("auto", "cuda:0,cuda:1"):
        with pytest.raises(OptionError, match="spreads a model over several devices"):
            load_model(folders["llama"], device=device)


@pytest.mark.parametrize(
    ("architecture", "changed", "text"),
    [
        ("mamba", {}, "calls attention 0 times"),
        ("bloom", {"n_head": 4, "hidden_size": 32}, "calls attention 0 times"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends in both directions"),
    ],
)
def test_models_that_attend_otherwise_are_refused(architecture: str, changed: dict[str, Any], text: str) -> None:
    config = (
        tiny_config(architecture, **changed)
        if architecture in ARCHITECTURES
        else AutoConfig.for_model(architecture, vocab_size=VOCABULARY, num_hidden_layers=3, **changed)
    )
    with pytest.raises(ModelError) as caught:
        find_sites(build_skeleton(config, dtype=torch.float32))
    assert text in str(caught.value)


def test_weights_of_another_model(folders: dict[str, Path], tmp_path: Path) -> None:
    wider = edited(folders["llama"], tmp_path / "wider", intermediate_size=64)
    with pytest.raises(BindError) as caught:
        load_model(wider)
    assert "the weight `model.layers.0.mlp.gate_proj.weight` has shape [48, 32] in `model.safetensors`" in str(
        caught.value
    )
    assert "and [64, 32] was expected" in str(caught.value)
    deeper = edited(folders["llama"], tmp_path / "deeper", num_hidden_layers=4)
    with pytest.raises(BindError, match=r"the weight `model.layers.3.self_attn.q_proj.weight` is not in"):
        load_model(deeper)
