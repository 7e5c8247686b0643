"""What names a model in keys: its classes and specs where it is an object, its configuration where it is a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from piecework.errors import ArtifactMissing
from piecework.models.folder import open_folder
from piecework.store.protocol import PROGRAM, Store
from piecework.values.digest import digest_data

# Keys of a configuration that say where it came from or who wrote it, and not what the model computes.
_NOT_COMPUTED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return what names a model given as an object: its classes, and the specs of its tensors."""
    tensors = [
        f"{name} {str(t.dtype)[6:]}{list(t.shape)}{'' if t.is_contiguous() else list(t.stride())} {t.device.type}"
        for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    ]
    classes = [f"{path} {type(m).__module__}:{type(m).__qualname__} {m.training}" for path, m in model.named_modules()]
    return {"class": f"{type(model).__module__}:{type(model).__qualname__}", "modules": classes, "tensors": tensors}


def describe_folder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what names a model given as a folder: its class and a digest of its configuration."""
    kept = {name: value for name, value in config.items() if name not in _NOT_COMPUTED}
    return {
        "class": "".join(config.get("architectures") or [str(config.get("model_type"))]),
        "config": digest_data(kept),
    }


def newest_of_folder(folder: str, store: Store) -> str:
    """Return the key of a stored program of a folder's model, whatever its options; the last in order."""
    wanted = describe_folder(open_folder(folder).config)
    for key in reversed(store.list_records(PROGRAM)):
        config = store.read_record(PROGRAM, key)["factors"]["config"]
        model = config["model"]
        if "side" not in config and all(model.get(name) == value for name, value in wanted.items()):
            return key
    raise ArtifactMissing(
        f"the store holds no program of the model in `{folder}`",
        hint="fill it with `piecework build MODEL`",
        facts={"folder": folder},
    )
