"""What a caller gave is of the kind that is asked for, or it is told what to give instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from piecework.errors import OptionError
from piecework.options import CompileOptions

_STORE = ("read_blob", "write_blob", "read_record", "write_record")


def check_model(model: Any) -> None:
    """Refuse a model that is none."""
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        _refuse("model", model, f"give an object: `{model.__name__}(...)`")
    if not isinstance(model, torch.nn.Module):
        _refuse("model", model, "give a `torch.nn.Module`; a function becomes one with a `forward` that calls it")


def check_example(example: Any) -> None:
    """Refuse example inputs that are neither forward's arguments in their order nor by their names."""
    if isinstance(example, torch.Tensor | str | bytes) or not isinstance(example, Mapping | Sequence):
        _refuse("example_inputs", example, "give a tuple in forward's order, `(x,)`, or a dictionary, `{'x': x}`")


def check_options(options: Any) -> None:
    """Refuse options that are no CompileOptions."""
    if options is not None and not isinstance(options, CompileOptions):
        _refuse("options", options, "give `pw.CompileOptions(...)`, or nothing for the defaults")


def check_store(store: Any, *, needed: bool = False) -> None:
    """Refuse a store that keeps nothing: a path names a folder and is not yet a store."""
    if isinstance(store, str | Path):
        _refuse("store", store, f"give `pw.DiskStore({str(store)!r})`")
    if (store is not None or needed) and not all(hasattr(store, name) for name in _STORE):
        _refuse("store", store, "give `pw.DiskStore(path)` or `pw.MemoryStore()`")


def check_key(key: Any) -> None:
    """Refuse a key that is no text."""
    if not isinstance(key, str) or not key:
        _refuse("key", key, "give a program's key as text: `program.key`, or what `piecework build` prints")


def check_weights(weights: Any) -> None:
    """Refuse weights that are neither a state dictionary nor a path."""
    if not isinstance(weights, Mapping | str | Path):
        _refuse("weights", weights, "give a state dictionary, a `.safetensors` file, or a folder that holds some")


def refuse_ranks(ranks: int) -> None:
    """Refuse to divide a model that is given as an object: what its modules mean is in no plan."""
    if ranks > 1:
        raise OptionError(
            f"`tensor_parallel_size` is `{ranks}`, and the model is given as an object",
            hint="give a model folder (`pw.LLM`, `piecework generate`), whose plan says what is divided",
        )


def check_bodies(ops: Any) -> None:
    """Refuse bodies of opaque operators that are neither named nor listed."""
    if ops is not None and (isinstance(ops, str) or not isinstance(ops, Mapping | Sequence)):
        _refuse("ops", ops, 'give a dictionary {"namespace::name": body}, or a list of declared operators')


def _refuse(name: str, value: Any, hint: str) -> None:
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"`{value!r}`"
    raise OptionError(f"`{name}` is {shown if len(shown) < 80 else f'a {type(value).__name__}'}", hint=hint)
