"""Where a model is: a local folder, or a hub's snapshot; told without torch."""

from __future__ import annotations

from pathlib import Path

from piecework.errors import ModelError


def locate(model: str | Path, *, offline: bool) -> Path:
    """Return the folder of a model: a local one, or a hub's snapshot where there is a network."""
    path = Path(model)
    if path.is_dir() or path.exists() or str(model).startswith((".", "/", "~")) or str(model).count("/") != 1:
        return path.expanduser()
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"there is no folder `{model}`", hint="install `piecework[hf]` to fetch a model by its hub name"
        ) from error
    try:
        return Path(snapshot_download(str(model), local_files_only=offline))
    except Exception as error:  # the hub's client raises a family of its own for every kind of absence
        raise ModelError(
            f"model `{model}` is neither a folder nor to be had from the hub: {type(error).__name__}",
            hint="give the path of a folder in Hugging Face format",
        ) from error
