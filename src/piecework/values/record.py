"""The manifest of a program as plain data: all that a warm start reads beside blobs; torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from piecework.errors import CorruptEntry
from piecework.values.digest import canonical_json
from piecework.values.signature import parse_spec

FORMAT = 1
_SEQUENCES = (
    "parameters", "arguments", "inputs", "symbols", "regions", "split_ops", "shape_guards", "siblings", "containers",
)  # fmt: skip


@dataclass(frozen=True)
class SourceFile:
    """A file that the trace read: its top-level package, the path inside it, and a digest of its bytes."""

    package: str
    path: str
    digest: str


@dataclass(frozen=True)
class CodeObject:
    """A function that the trace inlined: where it is found when its module is loaded, and a digest of its code."""

    module: str
    qualname: str
    digest: str


@dataclass(frozen=True)
class Fact:
    """A Python value that the trace relied on: how it is compared, the expression that reaches it, its text."""

    kind: str
    source: str
    value: str
    line: str


@dataclass(frozen=True)
class PieceRecord:
    """One distinct piece: the blob of its text, and the artifact's key for each box."""

    text: str
    artifacts: Mapping[str, str]


@dataclass(frozen=True)
class Record:
    """One traced, cut and compiled program, without its weights."""

    factors: Mapping[str, Any]
    parameters: tuple[tuple[str, Any], ...]
    arguments: tuple[str, ...]
    inputs: tuple[Mapping[str, Any], ...]
    symbols: tuple[Mapping[str, Any], ...]
    ranges: Mapping[str, tuple[str, ...]]
    values: Mapping[str, Mapping[str, Any]]
    regions: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any]
    pieces: tuple[PieceRecord, ...]
    split_ops: tuple[str, ...]
    operators: Mapping[str, str]
    constants: str
    sources: tuple[SourceFile, ...]
    evidence: str
    shape_guards: tuple[Mapping[str, Any], ...] = ()
    bounds: Mapping[str, str] = field(default_factory=dict)
    siblings: tuple[str, ...] = ()
    declarations: Mapping[str, str] = field(default_factory=dict)
    cpp_compiler: str = ""
    containers: tuple[Any, ...] = ()
    weight_rules: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    partition: str = "fx"
    format: int = FORMAT

    @property
    def device(self) -> str:
        """The type of the device that the program's tensors lie on."""
        specs = (str(binding["spec"]) for binding in self.values.values() if binding["kind"] != "symbol")
        return next((spec.rsplit(" ", 1)[-1] for spec in specs), "cpu")

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain data for the store."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """What is compared where a model or its modules are loaded; kept in a blob of its own, read only then."""

    code: tuple[CodeObject, ...]
    facts: tuple[Fact, ...]

    def encode(self) -> bytes:
        """Write the evidence as canonical JSON."""
        return canonical_json(asdict(self)).encode()


def decode_evidence(data: bytes) -> Evidence:
    """Read back what `Evidence.encode` wrote."""
    fields = json.loads(data)
    return Evidence(tuple(CodeObject(**c) for c in fields["code"]), tuple(Fact(**f) for f in fields["facts"]))


def record_from(data: Mapping[str, Any]) -> Record:
    """Read a record back; a field that is missing or of another shape is a corrupt entry."""
    try:
        fields = dict(data)
        fields["pieces"] = tuple(PieceRecord(piece["text"], piece["artifacts"]) for piece in data["pieces"])
        fields["sources"] = tuple(SourceFile(**source) for source in data["sources"])
        for name in _SEQUENCES:
            fields[name] = tuple(data[name])
        record = Record(**fields)
        for leaf in record.inputs:
            if leaf["spec"] is not None:
                parse_spec(leaf["spec"])
        if not record.pieces and any(region["kind"] == "piece" for region in record.regions):
            raise ValueError("regions without pieces")
        if any(not 0 <= r["piece"] < len(record.pieces) for r in record.regions if r["kind"] == "piece"):
            raise ValueError("a region of an unknown piece")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptEntry(f"a program record does not hold what its format says: {error}") from error
    return record
