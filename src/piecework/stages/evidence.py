"""Evidence: what a trace read besides tensors, so that a later start can tell whether it still holds.

Three kinds: source files (by top-level package and path inside it), code objects that were inlined (a
patched function is seen without any file having changed), and facts: Python values that the trace took
for constant, such as an epsilon, a flag, a hook dictionary that was empty.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from piecework.values.attributes import read_path
from piecework.values.digest import digest_bytes, digest_code
from piecework.values.record import CodeObject, Evidence, Fact, SourceFile, decode_evidence
from piecework.values.sources import FOUND, OWNER, found_on, owner_of, readable_source

_CONSTANT = {
    "CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS",
    "OWNER",
}  # fmt: skip
_PRESENT = {"HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"}
_SIZE = {"SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "EMPTY_NN_MODULE_HOOKS_DICT", "LIST_LENGTH", "TUPLE_ITERATOR_LEN"}
_IDENTITY = {"BUILTIN_MATCH", "ID_MATCH", "CLASS_MATCH"}
_REACHED = ("L['model']", "G['__import_")  # Python's own names are not reached again
_CODE = {"CLOSURE_MATCH", "FUNCTION_MATCH"}
_SKIPPED_PACKAGES = {"torch", "piecework"}


def collect(
    guards: Iterable[Any],
    code: Iterable[types.CodeType],
    tensors: Mapping[str, torch.Tensor] | None = None,
    model: Any = None,
) -> tuple[Evidence, tuple[SourceFile, ...]]:
    """Return what a trace relied on: code, facts and the specs of plain tensors by name, and the source files.

    With the model that was traced, facts are left out that cannot be read again: such would make every start a miss.
    """
    functions, sources = collect_code(code)
    specs = tuple(
        Fact("tensor", f"L['model'].{name}", _text("tensor", tensor), "")
        for name, tensor in (tensors or {}).items()
        if not name.startswith("constant_")
    )
    facts = collect_facts(guards)
    if model is not None:
        lost = {id(fact) for fact, _ in changed_facts(facts, model)}
        facts = tuple(fact for fact in facts if id(fact) not in lost)
    return Evidence(functions, (*facts, *specs)), sources


def why_stale(sources: Sequence[SourceFile], evidence: Callable[[], bytes], model: Any) -> str:
    """Return the first thing that does not hold any more, or an empty string.

    Without a model object its facts are not compared: source and config digests stand for them.
    """
    reason = changed_source(sources)
    if reason:
        return reason
    kept = decode_evidence(evidence())
    return changed_code(kept.code) or (changed_fact(kept.facts, model) if model is not None else "")


def collect_facts(guards: Iterable[Any]) -> tuple[Fact, ...]:
    """Turn the guards that hold Python values into facts, each once."""
    found: dict[tuple[str, str], Fact] = {}
    for guard in guards:
        kind = _kind(guard.kind)
        if guard.kind in _IDENTITY and guard.source.startswith(_REACHED):
            kind = "identity"
        if not kind or not guard.source or "L['args']" in guard.source or "L['kwargs']" in guard.source:
            continue
        try:
            value = _text(kind, guard.value)
        except (TypeError, ValueError, AttributeError):
            continue
        found.setdefault((kind, guard.source), Fact(kind, guard.source, value, guard.line.rsplit("/", 1)[-1]))
    return tuple(found.values())


def _kind(guard: str) -> str:
    if guard in _CONSTANT | _PRESENT:
        return "equal"
    if guard in _SIZE:
        return "keys"
    if guard in _CODE:
        return "code"
    if guard in ("CONTENT", "UNREAD"):  # a tensor of which the program has a copy, or of which forward read no value
        return guard.lower()
    return "type" if guard == "TYPE_MATCH" else ""


def _text(kind: str, value: Any) -> str:
    if kind == "keys":
        return repr(list(value.keys())) if isinstance(value, Mapping) else str(len(value))
    if kind == "identity":
        return _identity(value)
    if kind == "unread":
        return f"{value.dtype} {tuple(value.shape)} requires_grad={value.requires_grad}"
    if kind == "content":
        return f"{value.dtype} {tuple(value.shape)} {digest_bytes(_bytes(value))[:16]}"
    if kind == "tensor":
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device.type}"
    if kind == "type":
        return f"{type(value).__module__}:{type(value).__qualname__}"
    if kind == "code":
        return digest_code(value.__code__)
    if isinstance(value, torch.Tensor):
        raise TypeError("a tensor is no fact")
    return f"{type(value).__name__}:{value!r}" if " at 0x" not in repr(value) else _named(value)


def _identity(value: Any) -> str:
    """Write which object it is, as far as another process can tell: a member of an enumeration, a function, a type."""
    if isinstance(value, enum.Enum):
        return f"{_named(type(value))}.{value.name}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _named(value)
    return _text("type", value)


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor that is kept as a constant, however it is laid out."""
    plain = tensor.detach().cpu().contiguous().flatten()
    return bytes(plain.view(torch.uint8).numpy().data) if plain.numel() else b""


def _named(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def collect_code(code: Iterable[types.CodeType]) -> tuple[tuple[CodeObject, ...], tuple[SourceFile, ...]]:
    """Return the inlined functions by module and name, and the files they stand in."""
    by_file = {
        getattr(module, "__file__", None): name for name, module in list(sys.modules.items()) if module is not None
    }
    functions: dict[tuple[str, str], CodeObject] = {}
    files: dict[tuple[str, str], SourceFile] = {}
    for one in code:
        module = by_file.get(one.co_filename, "")
        if module.split(".")[0] in _SKIPPED_PACKAGES:
            continue
        functions.setdefault((module, one.co_qualname), CodeObject(module, one.co_qualname, digest_code(one)))
        source = _source_file(module, Path(one.co_filename))
        if source is not None:
            files.setdefault((source.package, source.path), source)
    return tuple(functions.values()), tuple(files.values())


def _source_file(module: str, path: Path) -> SourceFile | None:
    if not module or not path.is_file():
        return None
    package = module.split(".")[0]
    root = _package_folder(package)
    inside = path.relative_to(root).as_posix() if root is not None and path.is_relative_to(root) else path.name
    return SourceFile(package, inside, digest_bytes(path.read_bytes()))


def _package_folder(package: str) -> Path | None:
    """Return where a top-level package's files lie, without importing it."""
    loaded = sys.modules.get(package)
    file = getattr(loaded, "__file__", None)
    if file:
        return Path(file).parent
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin == "built-in":
        return None
    if spec.origin:
        return Path(spec.origin).parent
    # A package without `__init__.py` has no file of its own; it may lie in several folders, of which this is the first.
    return next((Path(place) for place in spec.submodule_search_locations or ()), None)


def changed_source(sources: Sequence[SourceFile]) -> str:
    """Return the first source file that is not what the trace read, or an empty string."""
    for source in sources:
        root = _package_folder(source.package)
        path = root / source.path if root is not None else None
        if path is None or not path.is_file():
            return f"source `{source.package}/{source.path}` is not found"
        if digest_bytes(path.read_bytes()) != source.digest:
            return f"source `{source.package}/{source.path}` changed"
    return ""


def changed_code(code: Sequence[CodeObject]) -> str:
    """Return the first inlined function whose loaded code is another, or an empty string."""
    for one in code:
        found = _live_code(sys.modules.get(one.module), one.qualname)
        if found and one.digest not in map(digest_code, found):
            return f"function `{one.module}.{one.qualname}` changed"
    return ""


def _live_code(module: Any, qualname: str) -> list[types.CodeType]:
    """Return the code that is found under a name: a decorated function's own, and that of what it wraps."""
    place = module
    for part in qualname.split("."):
        place = vars(place).get(part) if isinstance(place, type) else getattr(place, part, None)
        if place is None:
            return []
    found: list[types.CodeType] = []
    while place is not None and len(found) < 16:
        for attribute in ("__func__", "fget"):
            place = getattr(place, attribute, place)
        code = getattr(place, "__code__", None)
        found += [code] if isinstance(code, types.CodeType) else []
        place = getattr(place, "__wrapped__", None)
    return found


def changed_fact(facts: Sequence[Fact], model: Any) -> str:
    """Return the first fact that does not hold for `model` and the loaded modules, or an empty string."""
    return next((_told(fact, now) for fact, now in changed_facts(facts, model)), "")


def changed_facts(facts: Sequence[Fact], model: Any) -> Iterator[tuple[Fact, str]]:
    """Yield each fact that does not hold for `model` and the loaded modules, and what is there instead."""
    reach = _reacher(model)
    for fact in facts:
        try:
            now = _text(fact.kind, reach(fact.source))
        except Exception as error:  # noqa: BLE001  # whatever an attribute that went away raises: the fact does not hold
            now = f"gone ({type(error).__name__})"
        if now != fact.value:
            yield fact, now


def _told(fact: Fact, now: str) -> str:
    where = f" (read at {fact.line})" if fact.line else ""
    return f"`{readable_source(fact.source)}` was `{fact.value}` and is `{now}`{where}"


def what_changed(
    evidence: Iterable[tuple[Sequence[SourceFile], bytes]], model: Any, bound: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Return all that does not hold any more of what a program was traced and bound with.

    `bound` are the tensors that it reads, by qualified name; with a model, each must still be the model's own.
    """
    found: dict[str, None] = {}
    for sources, data in evidence:
        kept = decode_evidence(data)
        changed = [changed_source(sources), changed_code(kept.code)]
        found.update(dict.fromkeys(reason for reason in changed if reason))
        if model is not None:
            found.update(dict.fromkeys(_told(*pair) for pair in changed_facts(kept.facts, model)))
    for name, tensor in bound.items() if model is not None else ():
        live = read_path(model, name)
        if isinstance(live, torch.Tensor) and live.data_ptr() != tensor.data_ptr():
            found[f"weight `{name}` of the model is another tensor than the program reads: call `refresh()`"] = None
        elif live is None and not name.startswith("constant_"):
            found[f"weight `{name}` is not on the model any more"] = None
    return tuple(found)


class _Globals(dict[str, Any]):
    """Dynamo's global names, resolved when asked for: `__import_a_dot_b` is the loaded module `a.b`."""

    def __missing__(self, key: str) -> Any:
        if key.startswith("__import_"):
            return sys.modules[key.removeprefix("__import_").replace("_dot_", ".")]
        raise KeyError(key)


def _reacher(model: Any) -> Callable[[str], Any]:
    space = {"L": {"model": model}, "G": _Globals(), "___dict_keys": list}
    known = {"type": type, "dict": dict, "list": list, "getattr": getattr, "hasattr": hasattr}
    space |= {"___from_numpy": torch.as_tensor, OWNER: owner_of, FOUND: found_on}
    return lambda source: eval(source, {"__builtins__": known}, space)
