"""A model's modules without its weights: parameters on the meta device, computed buffers real."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from piecework.errors import ModelError, TraceError
from piecework.models.experts import has_swappable_experts
from piecework.models.folder import KvSite, Site, StateSite, refuse_config
from piecework.models.interface import IMPLEMENTATION, PROBE, probing, register


def build_skeleton(config: Any, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> Any:
    """Make the model that a configuration describes, allocating none of its parameters.

    The configuration is copied first: Transformers keeps it by reference, and the attention implementation in it is
    read at every call, so that a shared one would switch other models too.
    """
    register()
    config = copy.deepcopy(config)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    if has_swappable_experts(model):
        model.set_experts_implementation(IMPLEMENTATION)
    _apply_dtype_plan(model, dtype)
    _compute_buffers(model, device)
    return model.eval().requires_grad_(False)


def find_sites(model: Any, states: tuple[StateSite, ...] = ()) -> tuple[Site, ...]:
    """Run the model on the meta device and see where it calls attention, and with what; `states` are known already.

    Raises ModelError where a layer keeps its state in another way, or where attention is not plain causal attention.
    """
    kind = type(model).__name__
    config = model.config
    refuse_config(config.to_dict(), f"`{kind}`")
    probe = copy.deepcopy(model).to("meta")
    probe.set_attn_implementation(PROBE)
    probe.config.pad_token_id = None  # with one, some models read their input's values, and there are none here
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    try:
        with probing() as seen, torch.no_grad():
            probe(input_ids=tokens, position_ids=tokens, use_cache=False)
    except (RuntimeError, NotImplementedError) as error:  # of the model's own code, which asks for values
        raise _no_graph(kind, error) from error
    layers = config.get_text_config().num_hidden_layers
    names = [call.site for call in seen]
    served = {*names, *(state.name.removesuffix(".state") for state in states)}
    if len(set(names)) != len(names) or len(served) != layers:
        raise ModelError(
            f"`{kind}` has {layers} layers and calls attention {len(names)} times through Transformers' interface",
            hint="each layer needs one call; layers that keep another state (convolutions, recurrences) are not served",
            facts={"layers": layers, "sites": names},
        )
    sites = tuple(KvSite(call.site, call.num_kv_heads, call.head_dim, call.sliding_window) for call in seen)
    kinds = getattr(config, "layer_types", None) or []
    for site, layer_kind in zip(sites, kinds, strict=False) if not states else ():
        if (layer_kind == "sliding_attention") != bool(site.sliding_window):
            raise ModelError(
                f"`{kind}` has a `{layer_kind}` at `{site.name}`, and hands it a window of {site.sliding_window}",
                hint="its windows live in its masks alone, which Piecework's attention does not see",
                facts={"site": site.name},
            )
    return (*sites, *states)


def _no_graph(kind: str, error: Exception) -> TraceError:
    """Say which line of the model's code cannot stand in a graph."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages/torch/" not in f.filename]
    return TraceError(
        f"`{kind}` does not trace to one full graph at {frames[-1].filename}:{frames[-1].lineno}: {error}",
        hint="use torch.where, or make what reads values an opaque operator of your own",
        facts={"file": frames[-1].filename, "line": frames[-1].lineno},
    )


class LogitsModel(nn.Module):
    """The same modules under the same names, with a forward that gives logits alone.

    Names matter: a parameter keeps the name that it has in the model's own files.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        loose = [name for name, _ in _own_tensors(model)]
        if loose:
            raise ModelError(
                f"`{type(model).__name__}` keeps `{loose[0]}` outside its submodules",
                hint="weights directly on a causal language model are not served",
            )
        # In a tuple, so that the model does not count as a submodule and its parameters keep their names.
        self.causal_lm = (model,)

    @property
    def config(self) -> Any:
        return self.causal_lm[0].config

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | None = None) -> Tensor:
        """Compute the logits of flat tokens, of the last ones alone where an index is given.

        Tensors:
            input_ids       [1, T]     i64
            position_ids    [1, T]     i64  each token's place in its own sequence
            logits_to_keep  [B]        i64  rows whose logits are wanted; all of them where it is left out
            ->              [1, B, V]  model
        """
        kept = {} if logits_to_keep is None else {"logits_to_keep": logits_to_keep}
        output = self.causal_lm[0](input_ids=input_ids, position_ids=position_ids, use_cache=False, **kept)
        logits: Tensor = output.logits
        return logits


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(recurse=False)
    yield from model.named_buffers(recurse=False)


def _apply_dtype_plan(model: Any, dtype: torch.dtype) -> None:
    """Keep in float32 what the model's class says must stay there, as Transformers' own loading does."""
    plan = dict.fromkeys(model._keep_in_fp32_modules_strict or (), torch.float32) if dtype.itemsize == 2 else {}
    if dtype == torch.float16:
        plan |= dict.fromkeys(model._keep_in_fp32_modules or (), torch.float32)
    if not plan:
        return
    for name, module in model.named_modules():
        for last, parameter in list(module.named_parameters(recurse=False)):
            parts = f"{name}.{last}".split(".")
            kept = next((plan[part] for part in plan if part in parts or part in f"{name}.{last}"), None)
            if kept and parameter.dtype != kept:
                setattr(module, last, nn.Parameter(parameter.to(kept), requires_grad=False))


def _compute_buffers(model: Any, device: str | torch.device) -> None:
    """Give non-persistent buffers their values: no file holds them, the model's class computes them.

    The class's own initialisation does it; whatever is marked as initialised it leaves alone.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True
    computed: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        persistent = set(module.state_dict(keep_vars=True)) if _has_buffers(module) else set()
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in persistent:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
                computed.append((module, name))
    model.initialize_weights()
    for module, name in computed:
        setattr(module, name, getattr(module, name).to(device))


def _has_buffers(module: nn.Module) -> bool:
    return next(module.buffers(recurse=False), None) is not None
