"""Where weights are read from: safetensors files and their index, or a state dict; torch and safetensors alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from piecework.errors import BindError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightSource(Protocol):
    """Where weights are read from."""

    description: str

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> Tensor: ...


class StateDict:
    """Weights that are in memory already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.description = f"a state dict of {len(tensors)} tensors"
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            kind = "tensor without values (meta)" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise BindError(
                f"the weight `{name}` is a {kind}",
                hint="give a state dict of loaded tensors, or the path of a safetensors file",
                facts={"name": name},
            )
        return tensor.detach()


Hear = Callable[[int, int], None]
"""Is told the bytes of weights that were read so far, and those of all files."""


def unheard(done_bytes: int, total_bytes: int) -> None:
    """Tell nobody."""


class ReadBytes:
    """Counts the bytes of weights as they are read, each weight once."""

    def __init__(self, files: Mapping[str, Path], hear: Hear) -> None:
        self._hear = hear
        self._total = sum(path.stat().st_size for path in set(files.values()) if path.is_file())
        self._sizes: dict[str, int] = {}

    def add(self, name: str, size_bytes: int) -> None:
        """Count one weight, and tell how far the reading is."""
        self._sizes[name] = size_bytes
        self._hear(min(sum(self._sizes.values()), self._total), self._total)


class SafetensorsFiles:
    """One safetensors file, or the shards of an index. Tensors are views of the mapped files: nothing is copied."""

    def __init__(self, files: Mapping[str, Path], description: str, read: ReadBytes | None = None) -> None:
        self.description = description
        self._files = files
        self._handles: dict[Path, Any] = {}
        self._read = read

    def counting(self, hear: Hear) -> SafetensorsFiles:
        """Return the same files, with somebody who is told how much was read."""
        counted = SafetensorsFiles(self._files, self.description, ReadBytes(self._files, hear))
        counted._handles = self._handles
        return counted

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def reopened(self) -> SafetensorsFiles:
        """Return the same files with mappings of their own, which go when the tensors read from them have gone."""
        return SafetensorsFiles(self._files, self.description, self._read)

    def read(self, name: str) -> Tensor:
        path = self._files[name]
        handle = self._handles.get(path)
        if handle is None:
            handle = self._handles[path] = _open_file(path)
        try:
            tensor: Tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise BindError(
                f"`{path.name}` does not hold the weight `{name}` that the index says it holds: {error}",
                hint="the index and the shards are of different checkpoints, or a shard is incomplete",
                facts={"file": str(path), "name": name},
            ) from error
        if self._read is not None:
            self._read.add(name, tensor.nbytes)
        return tensor


def has_weights(folder: Path) -> bool:
    """Tell whether a model folder holds weights at all."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


def open_weights(source: str | Path | Mapping[str, Tensor]) -> WeightSource:
    """Open a model folder, a safetensors file, an index file, or a state dict."""
    if isinstance(source, Mapping):
        return StateDict(source)
    path = Path(source)
    if path.is_dir():
        single, index = path / SINGLE_FILE, path / INDEX_FILE
        if index.is_file():
            return _open_index(index)
        if single.is_file():
            return _open_single(single)
        raise _no_weights(path)
    if not path.is_file():
        raise BindError(
            f"there are no weights at `{path}`",
            hint="name a model folder, a `.safetensors` file, or an index of shards",
            facts={"path": str(path)},
        )
    return _open_index(path) if path.name.endswith(".json") else _open_single(path)


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise BindError(
            f"the shard `{path.name}` that the index names is not in `{path.parent}`",
            hint="fetch the whole checkpoint again",
            facts={"file": str(path)},
        ) from None
    except (SafetensorError, OSError) as error:
        raise BindError(
            f"`{path.name}` cannot be read as safetensors: {error}",
            hint="the file is damaged or cut short: fetch it again",
            facts={"file": str(path)},
        ) from error


def _open_single(path: Path) -> SafetensorsFiles:
    handle = _open_file(path)
    opened = SafetensorsFiles(dict.fromkeys(handle.keys(), path), f"`{path.name}`")
    opened._handles[path] = handle
    return opened


def _open_index(path: Path) -> SafetensorsFiles:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BindError(
            f"`{path.name}` is no index of shards: {type(error).__name__}: {error}",
            hint='an index is a JSON object with a "weight_map" from weight names to file names',
            facts={"file": str(path)},
        ) from error
    outside = sorted({file for file in files.values() if Path(file).name != file})
    if outside:
        raise BindError(
            f"`{path.name}` names the file `{outside[0]}`, which is not a plain file name",
            hint="shards lie beside their index",
            facts={"file": str(path), "names": outside},
        )
    return SafetensorsFiles({name: path.parent / file for name, file in files.items()}, f"`{path.name}`")


def _no_weights(folder: Path) -> BindError:
    others = sorted(each.name for each in folder.iterdir() if each.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f"the folder needs `{SINGLE_FILE}` or `{INDEX_FILE}`"
    if others:
        hint += f"; it has `{others[0]}`, which is not read: save it as safetensors first"
    return BindError(f"there are no weights in `{folder}`", hint=hint, facts={"folder": str(folder)})
