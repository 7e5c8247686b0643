"""What names a model in keys: its classes and specs where it is an object, its configuration where it is a folder."""

from __future__ import annotations

from typing import Any

import torch

from piecework.engine.requests import describe_folder
from piecework.errors import ArtifactMissing
from piecework.models.folder import open_folder
from piecework.store.protocol import PROGRAM, Store


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return what names a model given as an object: its classes, and the specs of its tensors."""
    tensors = [
        f"{name} {str(t.dtype)[6:]}{list(t.shape)}{'' if t.is_contiguous() else list(t.stride())} {t.device.type}"
        for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    ]
    classes = [f"{path} {type(m).__module__}:{type(m).__qualname__} {m.training}" for path, m in model.named_modules()]
    return {"class": f"{type(model).__module__}:{type(model).__qualname__}", "modules": classes, "tensors": tensors}


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
