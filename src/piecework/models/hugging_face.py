"""Any causal language model of Transformers whose attention goes through its interface, with no change to its code.

What comes back takes flat tokens: `input_ids` and `position_ids` [1, T] of any number of sequences one after another,
and the index of the rows whose logits are wanted. Keys and values live in pages that the step context brings.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from piecework.errors import ModelError, OptionError, PieceworkError
from piecework.models.conversion import weight_rules
from piecework.models.divided import divide
from piecework.models.folder import MIN_ROWS, ModelFolder, Site, open_folder
from piecework.models.mixers import swap_mixers
from piecework.models.skeleton import LogitsModel, build_skeleton, find_sites
from piecework.models.weight_files import Hear, has_weights, open_weights, unheard
from piecework.models.weights import Expected, Expression, assign, load_weights
from piecework.values.declaration import Dim, Dynamic
from piecework.values.placement import ALONE, Placement

EXAMPLE_TOKENS = 24
EXAMPLE_ROWS = 3


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be compiled or called, and what a caller needs to feed it.

    `example_inputs` and `dynamic` are arguments of `pw.compile`. `sites` tells what each layer's cache holds; `rules`
    how its weights are made of the folder's files; `expected` their shapes and dtypes.
    """

    model: LogitsModel
    config: Any
    folder: ModelFolder
    dtype: torch.dtype
    example_inputs: dict[str, Any]
    dynamic: Dynamic
    sites: tuple[Site, ...]
    rules: Mapping[str, Expression]
    expected: Mapping[str, Expected]

    @property
    def keeps_rows(self) -> bool:
        """Whether the model computes the logits of chosen rows alone; else it computes those of all."""
        return "logits_to_keep" in self.dynamic


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    with_weights: bool = True,
    hear: Hear = unheard,
    placement: Placement = ALONE,
) -> LoadedModel:
    """Build a folder's model around our attention, and load its weights where they are wanted.

    Without weights, parameters stay on the meta device and the weight files need not exist. `hear` is told how
    many bytes of weights were read, and of how many. With a `placement` among several ranks, the model is that rank's
    part of it, by the model's own plan. Raises ModelError for what is not served, and BindError where the
    files do not fit the model.
    """
    _check_device(device)
    opened = open_folder(folder)
    config = _read_config(opened)
    resolved = resolve_dtype(dtype, opened.config)
    return from_config(
        config, opened, dtype=resolved, device=device, with_weights=with_weights, hear=hear, placement=placement
    )


def from_config(
    config: Any,
    folder: ModelFolder,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    with_weights: bool,
    hear: Hear = unheard,
    placement: Placement = ALONE,
) -> LoadedModel:
    """Build the model of a configuration object, with the weights of a folder or with none."""
    skeleton, sites = _build(config, folder, dtype, device)
    source = open_weights(folder.path) if with_weights or has_weights(folder.path) else None
    rules = weight_rules(skeleton, source)
    if placement.ranks > 1:
        sites, rules = divide(skeleton, sites, rules, placement.ranks)
    expected = {name: Expected(tuple(each.shape), each.dtype) for name, each in skeleton.state_dict().items()}
    if with_weights and source is not None:
        assign(skeleton, load_weights(source, expected, rules=rules, device=device, hear=hear, placement=placement))
    keeps_rows = "logits_to_keep" in inspect.signature(type(skeleton).forward).parameters
    return LoadedModel(
        model=LogitsModel(skeleton).eval(),
        config=skeleton.config,
        folder=folder,
        dtype=dtype,
        example_inputs=example_inputs(device, keeps_rows=keeps_rows),
        dynamic=dynamic_dims(keeps_rows=keeps_rows),
        sites=sites,
        rules=rules,
        expected=expected,
    )


def _build(
    config: Any, folder: ModelFolder, dtype: torch.dtype, device: str | torch.device
) -> tuple[Any, tuple[Site, ...]]:
    try:
        skeleton = build_skeleton(config, dtype=dtype, device=device)
        return skeleton, find_sites(skeleton, swap_mixers(skeleton))
    except PieceworkError:
        raise
    except Exception as error:  # the model library's own: of values that it read without looking at them
        raise ModelError(
            f"Transformers cannot build the model that `{folder.path}` describes (`{folder.model_type}`): "
            f"{type(error).__name__}: {str(error)[:300]}",
            hint="a causal language model is served; if this is one, a value in its `config.json` may be damaged",
            facts={"model_type": folder.model_type},
        ) from error


def example_inputs(device: str | torch.device, *, keeps_rows: bool) -> dict[str, Any]:
    """Make inputs to trace with: sizes that are neither 0 nor 1, nor equal to one another."""
    inputs: dict[str, Tensor] = {
        "input_ids": torch.ones(1, EXAMPLE_TOKENS, dtype=torch.int64, device=device),
        "position_ids": torch.arange(EXAMPLE_TOKENS, device=device)[None],
    }
    if keeps_rows:
        inputs["logits_to_keep"] = torch.arange(EXAMPLE_ROWS, device=device)
    return inputs


def dynamic_dims(*, keeps_rows: bool) -> Dynamic:
    """Name the dims of those inputs that vary from call to call."""
    dims: dict[str, Any] = {"input_ids": {1: "tokens"}, "position_ids": {1: "tokens"}}
    return {**dims, "logits_to_keep": {0: Dim("rows", low=MIN_ROWS)}} if keeps_rows else dims


def resolve_dtype(dtype: torch.dtype | str, config: Mapping[str, Any]) -> torch.dtype:
    """Turn `auto`, a name or a dtype into a dtype; `auto` is the folder's own."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype
    if name == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise OptionError(
            f"`{dtype}` is no dtype that a model is served in",
            hint="use `auto`, `float32`, `bfloat16`, `float16` or `float64`",
            facts={"dtype": str(dtype)},
        )
    return found


def _read_config(folder: ModelFolder) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder.path, local_files_only=True)
    except Exception as error:  # what Transformers and its validators raise has no family of its own
        if folder.config.get("auto_map"):
            raise ModelError(
                f"`{folder.path}` brings its own code for `{folder.model_type}` (`trust_remote_code`)",
                hint="code from a model folder is not run; build the module yourself and give it to `pw.compile`",
                facts={"kind": "remote code", "model_type": folder.model_type},
            ) from error
        raise ModelError(
            f"Transformers cannot read the configuration of `{folder.path}` (`{folder.model_type}`): {error}",
            hint="the model may be newer than the installed Transformers, or `config.json` may be damaged",
            facts={"model_type": folder.model_type},
        ) from error
    return config


def _check_device(device: str | torch.device) -> None:
    if isinstance(device, torch.device):
        return
    if device in ("auto", "balanced") or "," in device:
        raise OptionError(
            f"`device={device}` spreads a model over several devices, which is not served",
            hint="name one device: `cpu`, `cuda` or `cuda:1`; several GPUs work together by tensor parallelism alone",
            facts={"device": device},
        )
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise OptionError(f"`{device}` is no device", hint="use `cpu`, `cuda` or `cuda:1`") from error
    if kind not in ("cpu", "cuda"):
        raise OptionError(f"a model does not run on `{device}`", hint="use `cpu`, `cuda` or `cuda:1`")
