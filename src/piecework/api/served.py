"""What an engine is told of a model folder, whoever opens it: its step, its limits, and what attends on its device."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

from piecework.engine.generate import StepFunction
from piecework.engine.served import Served
from piecework.models.folder import KvSite, ModelFolder, Site, paged_sites
from piecework.ops import AttentionBackend, ReferenceAttention
from piecework.runtime.captured import Borrowed
from piecework.seam.launch import quick_launch


def serve_folder(
    folder: ModelFolder,
    step: StepFunction,
    sites: Sequence[Site],
    *,
    dtype: torch.dtype,
    device: str,
    keeps_rows: bool,
    tokenizer: Tokenizer | None,
    weights_bytes: int = 0,
) -> Served:
    """Return what an engine needs to know of a folder's model, with what attends on its device.

    Raises ModelError where the model keeps a state that lies in no pages.
    """
    paged = paged_sites(sites, folder.path)
    return Served(
        step=step,
        sites=paged,
        dtype=dtype,
        device=device,
        keeps_rows=keeps_rows,
        end_of_sequence=folder.end_of_sequence,
        max_positions=folder.max_positions,
        vocabulary_size=int(folder.config.get("vocab_size") or 0),
        tokenizer=tokenizer,
        config=folder.config,
        weights_bytes=weights_bytes,
        backend=attention_backend(device, paged),
    )


def step_function(program: Any, keeps_rows: bool) -> StepFunction:
    """Return what an engine calls: the logits of chosen rows, picked afterwards where the model cannot choose.

    Tensors:
        ->  [...]  model
    """

    def step(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        chosen = {"logits_to_keep": rows} if keeps_rows else {}
        result = program(input_ids=ids, position_ids=positions, **chosen)
        logits: torch.Tensor = result.value if isinstance(result, Borrowed) else result
        return logits if keeps_rows else logits[:, rows]

    return step


def attention_backend(device: str, sites: Sequence[KvSite]) -> AttentionBackend:
    """Return what attends on a device: our kernels on a GPU where Triton is and the heads' widths serve."""
    if torch.device(device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return ReferenceAttention()
    from piecework.ops.triton_attention import TritonAttention, serves

    return TritonAttention(quick_launch) if all(serves(site.head_dim) for site in sites) else ReferenceAttention()
