"""Every value of the line as text, in order, and an edited piece read back.

    1_traced.txt      the full graph
    1_passes/         what each pass changed: one diff a pass, in order, with its matches
    2_split.txt       the same, cut into stretches
    3_pieces/         each distinct piece: the text that is compiled
    4_plan.json       which region calls which piece or operator on what
    5_artifacts/      what a compiler made of each piece for each range
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from piecework.api.folder import folder_request
from piecework.api.location import locate
from piecework.errors import OptionError, StoreError, TraceError
from piecework.events import Observer
from piecework.models.folder import open_folder
from piecework.options import CompileOptions
from piecework.passes import diff_of
from piecework.pipeline import Request, build
from piecework.seam.fx import PieceGraph, format_call, parse_piece
from piecework.store.protocol import ARTIFACT, KernelStore, Store
from piecework.values.digest import digest_data
from piecework.values.graph import Plan, SplitGraph, TracedGraph
from piecework.values.record import Record
from piecework.values.rewriting import PassStep

PASSES, PIECES = "1_passes", "3_pieces"


def altered(folder: Path | None = None, override: Path | None = None) -> Callable[[Request], Request]:
    """Return a change of a request: values are written to `folder`, pieces read back from `override`.

    A request with edited pieces looks for a record of its own: what is made of it is never taken for the model's.
    """
    edited = read_pieces(override) if override is not None else {}

    def witness(name: str, value: Any) -> Any:
        if name == "plan" and edited:
            value = _with_pieces(value, edited)
        if folder is not None:
            _WRITERS[name](folder, value)
        return value

    def alter(request: Request) -> Request:
        factors = dict(request.factors)
        if edited:
            factors["override"] = digest_data({str(number): text for number, text in edited.items()})
        return replace(request, factors=factors, witness=witness)

    return alter


def dump_folder(
    model: str,
    folder: Path,
    *,
    override: Path | None,
    dtype: str,
    device: str,
    options: CompileOptions,
    store: KernelStore,
    observer: Observer,
    offline: bool,
) -> tuple[str, Record, int]:
    """Trace a model folder anew and write each value of the line; return key, record and the artifacts' number."""
    opened = open_folder(locate(model, offline=offline))
    request = altered(folder, override)(folder_request(opened, dtype, device, options))
    key, record = build(request, store, observer)
    return key, record, _write_artifacts(folder, record, store)


def read_pieces(folder: Path) -> dict[int, str]:
    """Read the edited texts of pieces: `3_pieces/piece_0.py` and so on, in a dump's folder or on their own."""
    place = folder / PIECES if (folder / PIECES).is_dir() else folder
    found = {}
    for path in sorted(place.glob("piece_*.py")):
        number = path.stem.removeprefix("piece_")
        if number.isdecimal():
            found[int(number)] = _normal(path.read_text(encoding="utf-8"))
    if not found:
        raise OptionError(f"`{folder}` holds no piece", hint="give a folder that `piecework dump MODEL DIR` wrote")
    return found


def _normal(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def _with_pieces(plan: Plan, edited: Mapping[int, str]) -> Plan:
    """Put edited texts in their pieces' places: they must take and return what those did."""
    texts = list(plan.pieces)
    for number, text in edited.items():
        if number >= len(texts):
            raise OptionError(
                f"there is no piece `{number}` to replace", hint=f"the model has pieces 0 to {len(texts) - 1}"
            )
        if text != texts[number]:
            _check_fits(number, texts[number], text)
            texts[number] = text
    return replace(plan, pieces=tuple(texts))


def _check_fits(number: int, old: str, new: str) -> None:
    try:
        first, second = parse_piece(old), parse_piece(new)
    except TraceError as error:
        raise OptionError(
            f"the edited piece `{number}` is not read: {error.message}",
            hint="a piece is one function of calls `v0 = torch.x(...)` that returns a tuple",
        ) from error
    if first.parameters != second.parameters or _results(first) != _results(second):
        raise OptionError(
            f"the edited piece `{number}` takes or returns something else than before",
            hint="leave its parameters and the number of its results as they are: its sites are not edited",
        )


def _results(piece: PieceGraph) -> int:
    return len(piece.graph.output_node().args[0])  # type: ignore[arg-type]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"`{path}` cannot be written: {error.strerror}", hint="give a folder that takes writes"
        ) from error


def _write_traced(folder: Path, traced: TracedGraph) -> None:
    names = {node: node.name for node in traced.graph.nodes}
    lines = [f"{name}: {binding.kind} `{binding.name}` {binding.spec}" for name, binding in traced.bindings.items()]
    lines += ["", *(_node_line(node, names) for node in traced.graph.nodes if node.op.startswith("call"))]
    _write(folder / "1_traced.txt", "\n".join([*lines, f"result: {json.dumps(traced.result)}"]) + "\n")


def _node_line(node: Any, names: Mapping[Any, str]) -> str:
    return f"{node.name} = {format_call(node, names)}    # {node.meta.get('spec', '')}"


def _write_passes(folder: Path, steps: Sequence[PassStep]) -> None:
    for index, step in enumerate(steps):
        report = step.report
        lines = [f"# pass {report.name}, version {report.version}: {len(report.matches)} matches"]
        lines += [f"#   {place}" for place in report.matches]
        lines += [f"#   left alone: {place}" for place in report.misses]
        lines += [f"# {report.note}"] if report.note else []
        _write(folder / PASSES / f"{index}_{report.name}.diff", "\n".join([*lines, *diff_of(step)]) + "\n")


def _write_split(folder: Path, cut: SplitGraph) -> None:
    names = {node: node.name for node in cut.traced.graph.nodes}
    lines = [f"cut at: {', '.join(cut.split_ops) or 'nothing'}"]
    for index, stretch in enumerate(cut.stretches):
        given = ", ".join(names[node] for node in stretch.inputs)
        lines += ["", f"region {index}: {stretch.kind}({given})"]
        lines += [f"    {_node_line(node, names)}" for node in stretch.nodes]
        lines += [f"    return {', '.join(names[node] for node in stretch.outputs)}"]
    _write(folder / "2_split.txt", "\n".join(lines) + "\n")


def _write_plan(folder: Path, plan: Plan) -> None:
    for number, text in enumerate(plan.pieces):
        _write(folder / PIECES / f"piece_{number}.py", text)
    regions = [
        {
            "kind": region.kind,
            **({"piece": region.piece} if region.piece >= 0 else {}),
            "arguments": list(region.arguments),
            "results": list(region.results),
            "calls": [f"{call.results} = {call.operator}({call.arguments})" for call in region.calls],
        }
        for region in plan.regions
    ]
    values = {name: {"kind": b.kind, "name": b.name, "spec": str(b.spec)} for name, b in plan.values.items()}
    found = {"split_ops": plan.split_ops, "regions": regions, "values": values, "result": plan.result}
    _write(folder / "4_plan.json", json.dumps(found, indent=2) + "\n")


_WRITERS: Mapping[str, Callable[[Path, Any], None]] = {
    "traced": _write_traced,
    "passes": _write_passes,
    "split": _write_split,
    "plan": _write_plan,
}


def _write_artifacts(folder: Path, record: Record, store: Store) -> int:
    """Write what was compiled of each piece for each range; return how many artifacts that is."""
    written = 0
    for number, piece in enumerate(record.pieces):
        for box, key in piece.artifacts.items():
            place = folder / "5_artifacts" / f"piece_{number}" / box
            artifact = store.read_record(ARTIFACT, key)
            _write(place / "code.py", store.read_blob(artifact["text"]).decode())
            facts = {name: artifact[name] for name in ("kind", "guards", "facts", "factors", "size_bytes")}
            _write(place / "facts.json", json.dumps({"key": key, **facts}, indent=2) + "\n")
            for name, digest in artifact["kernels"].items():
                if not name.replace("_", "").isalnum():
                    raise StoreError(f"artifact `{key[:12]}` names a kernel `{name}`, which is no file's name")
                (place / f"{name}.bin").write_bytes(store.read_blob(digest))
            written += 1
    return written
