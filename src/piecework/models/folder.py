"""A model folder in Hugging Face format: what its small files say, and which folders are not served."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecework.errors import ModelError

MIN_ROWS = 2
"""A step asks for the logits of at least so many rows, one twice if need be: that spares the artifacts of size 1."""


@dataclass(frozen=True)
class KvSite:
    """What one site's cache holds a token, and how long.

    A `sliding_window` of n says that keys older than n tokens are never read again; 0 says that all are.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0


@dataclass(frozen=True)
class StateSite:
    """What one site remembers of a sequence, of one size however long the sequence."""

    name: str
    channels: int
    width: int
    num_heads: int
    head_dim: int
    state_size: int


Site = KvSite | StateSite


def site_from(values: Mapping[str, Any]) -> Site:
    """Read a site back from plain data."""
    return KvSite(**values) if "num_kv_heads" in values else StateSite(**values)


def paged_sites(sites: Iterable[Site], path: Path) -> tuple[KvSite, ...]:
    """Return the sites of a model whose every state lies in pages, as an engine needs it that batches sequences."""
    return require_pages(
        sites, str(path), "the engine does not batch", "`piecework generate` serves it, one sequence at a time"
    )


def require_pages(sites: Iterable[Site], model: str, why_not: str, hint: str) -> tuple[KvSite, ...]:
    """Return sites that all keep pages; raise ModelError where one keeps a recurrent state, and say why that fails."""
    found = tuple(sites)
    states = [site.name for site in found if isinstance(site, StateSite)]
    if states:
        raise ModelError(
            f"`{model}` keeps a recurrent state at `{states[0]}`, which {why_not}", hint=hint, facts={"sites": states}
        )
    return tuple(site for site in found if isinstance(site, KvSite))


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose configuration was read and found to be of a kind that is served."""

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def end_of_sequence(self) -> frozenset[int]:
        """The token ids that end a text."""
        for values in (self.generation, self.config):
            found = values.get("eos_token_id")
            if found is not None:
                return _token_ids(found, self.path)
        return frozenset()

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for; 0 where it does not say."""
        return int(_first(self.config, "max_position_embeddings", "n_positions", "n_ctx") or 0)

    @property
    def tokenizer_file(self) -> Path | None:
        """The file of a fast tokenizer, where there is one."""
        file = self.path / "tokenizer.json"
        return file if file.is_file() else None


def _token_ids(found: Any, folder: Path) -> frozenset[int]:
    ids = found if isinstance(found, list) else [found]
    wrong = [each for each in ids if type(each) is not int]
    if wrong:
        raise ModelError(
            f"`eos_token_id` in `{folder}` is `{found!r}`",
            hint="it has to be a token id, or a list of them: mend `generation_config.json` or `config.json`",
            facts={"folder": str(folder)},
        )
    return frozenset(ids)


def site_name(layer: int) -> str:
    """Name the site of a layer's attention."""
    return f"layers.{layer}"


def open_folder(path: str | Path) -> ModelFolder:
    """Read a folder's configuration; raise ModelError where it is missing, broken, or of a kind not served."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder at `{folder}`",
            hint="name a local folder in Hugging Face format (`config.json`, `model.safetensors`, `tokenizer.json`)",
            facts={"folder": str(folder)},
        )
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"`{folder}` is an adapter (LoRA or alike), not a whole model",
            hint="merge it into its base model first: `PeftModel.merge_and_unload()`, then `save_pretrained`",
            facts={"folder": str(folder), "kind": "adapter"},
        )
    config = _read_json(folder / "config.json", needed=True)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"`config.json` in `{folder}` has no `model_type`",
            hint="it is not the configuration of a Hugging Face model",
            facts={"folder": str(folder)},
        )
    opened = ModelFolder(folder, config, _read_json(folder / "generation_config.json", needed=False))
    refuse_config(config, f"`{folder}`")
    return opened


def refuse_config(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError if the configuration asks for what is not served."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        raise ModelError(
            f"{where} is quantised (`{method}`), which is not served",
            hint="use the checkpoint in bfloat16 or float32 that it was made from",
            facts={"kind": "quantised", "method": method},
        )
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list | tuple) and all(isinstance(kind, str) for kind in kinds)):
        raise ModelError(
            f"`layer_types` of {where} is `{kinds!r}`, not a list of names",
            hint="`config.json` is damaged: fetch it again",
            facts={"kind": "layer type"},
        )
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention", "attention"}) if kinds else []
    if unknown:
        raise ModelError(
            f"{where} has layers of type `{unknown[0]}`, which keep a state that a paged key-value cache does not hold",
            hint="layers of full or sliding-window attention are served",
            facts={"kind": "layer type", "types": unknown},
        )


def kv_sites(config: Mapping[str, Any]) -> tuple[KvSite, ...]:
    """Tell each layer's cache from a configuration alone, without the model: for a start that loads no model library.

    Windows are told only where the configuration lists its layers' types: else all keys are kept, which is right.
    """
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    if not layers or not heads or not hidden:
        raise ModelError(
            f"the configuration of a `{config.get('model_type')}` does not say how many layers and heads it has",
            hint="it needs `num_hidden_layers`, `num_attention_heads` and `hidden_size`, or their older names",
        )
    kv_heads = _first(config, "num_key_value_heads") or heads
    head_dim = _first(config, "head_dim") or hidden // heads
    window = config.get("sliding_window") or 0
    kinds = config.get("layer_types") or ["full_attention"] * layers
    return tuple(
        KvSite(site_name(layer), kv_heads, head_dim, window if kinds[layer] == "sliding_attention" else 0)
        for layer in range(layers)
    )


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _read_json(file: Path, *, needed: bool) -> dict[str, Any]:
    if not file.is_file():
        if not needed:
            return {}
        raise ModelError(
            f"there is no `{file.name}` in `{file.parent}`",
            hint="the folder is not a model in Hugging Face format, or it was not fetched whole",
            facts={"folder": str(file.parent)},
        )
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(
            f"`{file.name}` in `{file.parent}` is not JSON: {error}",
            hint="the file is damaged: fetch it again",
            facts={"file": str(file)},
        ) from error
    if not isinstance(value, dict):
        raise ModelError(
            f"`{file.name}` in `{file.parent}` holds a {type(value).__name__}, not an object",
            hint="the file is damaged: fetch it again",
            facts={"file": str(file)},
        )
    return value
