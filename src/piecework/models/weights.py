"""Weights by name, straight from safetensors files or a state dict: torch and safetensors alone.

A name that no file holds is made by a *rule*: another name (tied weights, renamed checkpoints), or an expression over
names (experts that a checkpoint keeps apart and the model keeps in one tensor). Rules are JSON, so that a record
can carry them and a warm start needs no model library to follow them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from piecework.errors import BindError

Expression: TypeAlias = "str | list[Any]"
"""A name, or `["stack" | "cat", dim, [expression, ...]]`, `["chunk", dim, index, count, expression]`,
`["transpose", dim, dim, expression]`."""

Rules: TypeAlias = Mapping[str, Expression]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Expected(NamedTuple):
    """What a name must hold: a weight of another shape is an error, of another float dtype it is cast."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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


class SafetensorsFiles:
    """One safetensors file, or the shards of an index. Tensors are views of the mapped files: nothing is copied."""

    def __init__(self, files: Mapping[str, Path], description: str) -> None:
        self.description = description
        self._files = files
        self._handles: dict[Path, Any] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

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


def load_weights(
    source: str | Path | Mapping[str, Tensor] | WeightSource,
    names: Mapping[str, Expected | tuple[tuple[int, ...], torch.dtype]] | Iterable[str],
    *,
    rules: Rules | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """Read the weights that are asked for, each by its own name or by its rule.

    Names that come to the same tensor share it. With shapes and dtypes given, each weight is checked, and cast where
    both dtypes are floating. Raises BindError naming the weight, what was expected and what was found.
    """
    opened = open_weights(source) if isinstance(source, str | Path | Mapping) else source
    expected = {name: Expected(*each) for name, each in names.items()} if isinstance(names, Mapping) else {}
    known = opened.names()
    rules = rules or {}
    made: dict[tuple[str, torch.dtype | None], Tensor] = {}
    loaded: dict[str, Tensor] = {}
    for name in names:
        expression = _resolve(name, rules, known, opened)
        want = expected.get(name)
        at = (json.dumps(expression), want.dtype if want else None)
        if at not in made:
            tensor = evaluate(expression, opened)
            made[at] = _fitted(name, tensor, want, opened).to(device)
        elif want and tuple(made[at].shape) != want.shape:
            _fitted(name, made[at], want, opened)
        loaded[name] = made[at]
    return loaded


def sources_of(expression: Expression) -> list[str]:
    """List the names that an expression reads."""
    if isinstance(expression, str):
        return [expression]
    last = expression[-1]
    parts = last if expression[0] in ("stack", "cat") else [last]
    return [name for part in parts for name in sources_of(part)]


def evaluate(expression: Expression, source: WeightSource) -> Tensor:
    """Make the tensor that an expression describes."""
    if isinstance(expression, str):
        return source.read(expression)
    kind, *rest = expression
    if kind in ("stack", "cat"):
        dim, parts = rest
        join = torch.stack if kind == "stack" else torch.cat
        return join([evaluate(part, source) for part in parts], dim=dim)
    if kind == "chunk":
        dim, index, count, part = rest
        return evaluate(part, source).chunk(count, dim=dim)[index].contiguous()
    if kind == "transpose":
        first, second, part = rest
        return evaluate(part, source).transpose(first, second).contiguous()
    raise BindError(
        f"a weight rule asks for `{kind}`, which this release does not know",
        hint="the record was written by a later release: build it again with this one",
        facts={"rule": expression},
    )


def assign(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put tensors in the place of a model's parameters and buffers, without a copy; shared ones stay shared."""
    parameters: dict[int, nn.Parameter] = {}
    for name, tensor in weights.items():
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        if last in dict(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(tensor) not in parameters:
                parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=False)
            setattr(owner, last, parameters[id(tensor)])
        elif last in dict(owner.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(owner, last, tensor)
        else:
            raise BindError(
                f"the model has no weight `{name}`",
                hint="the weights are of another model than the folder's configuration describes",
                facts={"name": name},
            )


def _resolve(name: str, rules: Rules, known: frozenset[str], source: WeightSource) -> Expression:
    expression = rules.get(name)
    if expression is not None and known.issuperset(sources_of(expression)):
        return expression
    if name in known:
        return name
    if expression is not None and not isinstance(expression, str):
        absent = sorted(set(sources_of(expression)) - known)
        what = f"the weight `{name}` is made of {len(sources_of(expression))} others, of which `{absent[0]}` is not in"
    else:
        what = f"the weight `{name}` is not in"
    raise BindError(
        f"{what} {source.description}",
        hint="the checkpoint is incomplete or of another model; " + _nearest(name, known),
        facts={"name": name, "rule": expression},
    )


def _nearest(name: str, known: frozenset[str]) -> str:
    last = name.rpartition(".")[2]
    alike = sorted(other for other in known if other.endswith(last))[:3]
    return "it has " + ", ".join(f"`{other}`" for other in alike or sorted(known)[:3])


def _fitted(name: str, tensor: Tensor, want: Expected | None, source: WeightSource) -> Tensor:
    if want is None:
        return tensor
    if tuple(tensor.shape) != tuple(want.shape):
        raise BindError(
            f"the weight `{name}` has shape {list(tensor.shape)} in {source.description}, "
            f"and {list(want.shape)} was expected",
            hint="the checkpoint and the configuration are of different models",
            facts={"name": name, "expected": list(want.shape), "got": list(tensor.shape)},
        )
    if tensor.dtype == want.dtype:
        return tensor
    if not (tensor.dtype.is_floating_point and want.dtype.is_floating_point) or tensor.element_size() == 1:
        raise BindError(
            f"the weight `{name}` is `{tensor.dtype}` in {source.description}, and `{want.dtype}` was expected",
            hint="only floating dtypes of two bytes and more are cast; a quantised checkpoint is not served",
            facts={"name": name, "expected": str(want.dtype), "got": str(tensor.dtype)},
        )
    return tensor.to(want.dtype)


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
