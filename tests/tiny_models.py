"""Tiny random models of the sixteen architectures that the adapter is held to, three layers each.

Windows are 8 tokens, so that a test's prompts reach beyond them; weights are larger than a fresh model's, so that
logits differ by more than rounding.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW = 8
VOCABULARY = 96

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "phi3",
    "olmo2",
    "smollm3",
    "granite",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
)

# How many sets of parallel linears three layers hold: q/k/v, and gate/up where a layer has them apart and no experts.
MERGED = dict.fromkeys(ARCHITECTURES, 6) | dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), 3)
MERGED |= dict.fromkeys(("gpt2", "gpt_neox", "phi3"), 0)

# How many calls of three layers give back what they were given, in float32: casts and views that a model makes anyway.
NO_OPS = {
    "llama": 20, "mistral": 20, "qwen2": 20, "qwen3": 32, "gemma": 28, "gemma2": 46, "gemma3_text": 67, "gpt2": 13,
    "gpt_neox": 13, "phi3": 26, "olmo2": 36, "smollm3": 20, "granite": 20, "mixtral": 32, "qwen3_moe": 44,
    "gpt_oss": 26,
}  # fmt: skip

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "query_pre_attn_scalar": 16,
    },
    "gpt_neox": {"rotary_pct": 0.5},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {
        "layer_types": _MIXED,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "no_rope_layer_interval": 2,
    },
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 1.5},
    "mixtral": {**_EXPERTS, "num_local_experts": 4, "sliding_window": WINDOW},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16},
    "gpt_oss": {
        **_EXPERTS,
        "num_local_experts": 4,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
}


def tiny_config(architecture: str, **changed: Any) -> Any:
    """Make a three-layer configuration of one architecture."""
    if architecture == "gpt2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        names |= {"max_position_embeddings": "n_positions"}
        dropped = {"intermediate_size", "num_key_value_heads"}
        values = {names.get(name, name): value for name, value in _COMMON.items() if name not in dropped}
    else:
        values = dict(_COMMON)
    if architecture == "gpt_neox":
        del values["num_key_value_heads"]
    return AutoConfig.for_model(architecture, **{**values, **_SPECIAL.get(architecture, {}), **changed})


def tiny_model(architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """Make a random model with Transformers' own eager attention."""
    config = copy.deepcopy(tiny_config(architecture, **changed))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * (0.5 if "embed" in name or "wte" in name else 0.25))
    return model


def tiny_folder(architecture: str, folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Write a random model as Transformers itself writes it."""
    tiny_model(architecture, seed=seed, **changed).save_pretrained(folder)
    return folder
