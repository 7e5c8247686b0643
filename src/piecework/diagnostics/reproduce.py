"""A folder that shows one fault alone: a piece's text, its compiled form, its inputs, and a script that runs both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from piecework.diagnostics.captured_form import CapturedPiece, device_like
from piecework.errors import OptionError
from piecework.seam.fx import parse_piece
from piecework.seam.loader import load
from piecework.stages.verify.beside import expect
from piecework.values.artifact import OBJECT, Artifact, LoadedPiece
from piecework.values.difference import Difference
from piecework.values.digest import digest_bytes

_SCRIPT = '''"""Run one piece beside its compiled form on the inputs of this folder, and say which results differ."""

import sys
from pathlib import Path

from piecework.diagnostics.reproduce import rerun, write_lines

MODULES = {modules!r}  # they register the operators that the piece calls

for name in MODULES:
    __import__(name)
found = rerun(Path(__file__).resolve().parent)
sys.stdout.write("\\n".join(write_lines(found)) + "\\n")
sys.exit(any(each.is_fault for each in found))
'''


def write_reproduction(
    folder: Path, text: str, artifact: Artifact, values: Sequence[Any], notes: dict[str, Any], modules: Sequence[str]
) -> Path:
    """Write a piece, its compiled form and the inputs on which they differ; return the script that runs them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "piece.py").write_text(text, encoding="utf-8")
        (folder / "compiled.py").write_text(artifact.text, encoding="utf-8")
        for data in artifact.kernels.values():
            (folder / digest_bytes(data)).write_bytes(data)
        script = folder / "repro.py"
        script.write_text(_SCRIPT.format(modules=tuple(modules)), encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"`{folder}` cannot be written: {error.strerror}", hint="give a folder that takes writes"
        ) from error
    names = [name for name, _ in parse_piece(text).parameters]
    tensors, plain = {}, {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, torch.Tensor):
            tensors[name] = _flat(value.detach())
            plain[name] = {"shape": list(value.shape), "stride": list(value.stride()), "device": value.device.type}
        else:
            plain[name] = {"value": value}
    save_file(tensors, folder / "inputs.safetensors")
    kernels = {name: digest_bytes(data) for name, data in artifact.kernels.items()}
    facts = {"kind": artifact.kind, "kernels": kernels, "guards": list(artifact.guards), "facts": dict(artifact.facts)}
    document = {"inputs": plain, "artifact": facts, **notes}
    (folder / "facts.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return script


def _flat(value: torch.Tensor) -> torch.Tensor:
    """Return the memory that a tensor spans, so that its strides can be given back to it."""
    if not value.numel():
        return value.reshape(-1).cpu()
    count = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((count,), (1,)).cpu().clone()


def rerun(folder: Path) -> list[Difference]:
    """Run a folder's piece beside its compiled form; return what each result differs by."""
    document = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    noted = document["artifact"]
    if noted["kind"] == OBJECT:
        raise OptionError(
            "the compiled form was a function of the process that found the fault",
            hint="bisect with a compiler whose artifacts can be stored",
        )
    kernels = {name: (folder / digest).read_bytes() for name, digest in noted["kernels"].items()}
    compiled = (folder / "compiled.py").read_text(encoding="utf-8")
    artifact = Artifact(noted["kind"], compiled, kernels, tuple(noted["guards"]), noted["facts"])
    piece = parse_piece((folder / "piece.py").read_text(encoding="utf-8"))
    tensors = load_file(folder / "inputs.safetensors")
    values = [_restore(tensors.get(name), document["inputs"][name]) for name, _ in piece.parameters]
    loaded: LoadedPiece = load(artifact, kernel_path=lambda digest: folder / digest)
    if document.get("stage") == "capture":
        kind = "cuda" if any(noted.get("device") == "cuda" for noted in document["inputs"].values()) else "cpu"
        loaded = CapturedPiece(loaded, device_like(kind))
    return expect(piece, values).against(loaded)


def _restore(flat: torch.Tensor | None, noted: dict[str, Any]) -> Any:
    if flat is None:
        return noted["value"]
    return flat.to(noted["device"]).as_strided(noted["shape"], noted["stride"])


def write_lines(found: Sequence[Difference]) -> list[str]:
    """Lay out what each result differs by."""
    return [each.fault or _line(each) for each in found]


def _line(found: Difference) -> str:
    if not found.is_compared:
        return f"`{found.name}` holds no value to compare"
    return f"`{found.name}` is off by {found.error:.2e}, allowed are {found.allowed:.2e}"
