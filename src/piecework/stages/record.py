"""Record: traced graph, plan and artifact keys become the manifest that a warm start reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from safetensors.torch import load, save

from piecework.seam.kinds import written_placeholders
from piecework.seam.names import module_of_operator
from piecework.seam.operators import declaration_digest
from piecework.store.protocol import Store
from piecework.values.arguments import parameters_of
from piecework.values.declaration import registry
from piecework.values.graph import OpaqueCall, Plan, TracedGraph
from piecework.values.record import Evidence, PieceRecord, Record, SourceFile
from piecework.values.shapes import Range


class Proof(Protocol):
    """A condition on sizes, the user's line, and how it was shown to hold."""

    @property
    def expression(self) -> str: ...

    @property
    def line(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def checked(self) -> int: ...


class Source(Protocol):
    """What the record keeps of the model that was traced."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def weight_rules(self) -> Mapping[str, Any]: ...

    @property
    def notes(self) -> Mapping[str, Any]: ...


def make_record(
    traced: TracedGraph,
    plan: Plan,
    factors: Mapping[str, Any],
    ranges: Mapping[str, Sequence[Range]],
    artifacts: Mapping[tuple[int, str], str],
    evidence: tuple[Evidence, tuple[SourceFile, ...]],
    source: Source,
    store: Store,
    *,
    proofs: Sequence[Proof] = (),
    bounds: Mapping[str, Range] | None = None,
    siblings: Sequence[str] = (),
    cpp_compiler: str = "",
) -> Record:
    """Write the blobs that a record refers to, and return the record.

    `bounds` are the sizes that the record and its `siblings` serve together, `proofs` those of its conditions.
    """
    pieces = tuple(
        PieceRecord(store.write_blob(text.encode()), {box: key for (n, box), key in artifacts.items() if n == number})
        for number, text in enumerate(plan.pieces)
    )
    written = _written(traced)
    return Record(
        factors=factors,
        parameters=parameters_of(source.model.forward, traced.arguments),
        arguments=traced.arguments,
        inputs=_inputs(traced, written),
        symbols=tuple({"name": s.name, "kind": s.kind, "places": [list(p) for p in s.places]} for s in traced.symbols),
        ranges={name: tuple(map(str, cuts)) for name, cuts in ranges.items()},
        values={name: _binding(binding, written) for name, binding in plan.values.items()},
        regions=tuple(_region(region) for region in plan.regions),
        result=plan.result,
        pieces=pieces,
        split_ops=plan.split_ops,
        partition=plan.partition,
        operators={name: _module_of(name) for name in plan.operators},
        constants=store.write_blob(save(_constants(traced, source.model))),
        sources=evidence[1],
        evidence=store.write_blob(evidence[0].encode()),
        shape_guards=tuple(_condition(proof, evidence[1]) for proof in proofs),
        bounds={name: str(bound) for name, bound in (bounds or {}).items()},
        siblings=tuple(siblings),
        declarations={name: digest for name in plan.operators if (digest := declaration_digest(name))},
        cpp_compiler=cpp_compiler,
        containers=tuple([path, keys] for path, keys in traced.containers),
        weight_rules=dict(source.weight_rules),
        notes=dict(source.notes),
    )


def _condition(proof: Proof, sources: Sequence[SourceFile]) -> dict[str, Any]:
    line = _portable(proof.line, sources)
    return {"expression": proof.expression, "line": line, "method": proof.method, "checked": proof.checked}


def _portable(line: str, sources: Sequence[SourceFile]) -> str:
    """Return `path:line (code)` without this machine's folders: the path begins at its top-level package."""
    path, colon, rest = line.partition(":")
    if not colon:
        return line
    known = [one for one in sources if path.endswith(f"/{one.path}")]
    if known:
        best = max(known, key=lambda one: len(one.path))
        return f"{best.package}/{best.path}:{rest}"
    _, installed, inside = path.rpartition("site-packages/")
    return f"{inside if installed else path.rpartition('/')[2]}:{rest}"


def _written(traced: TracedGraph) -> frozenset[tuple[str, str]]:
    """Return the kinds and names of the inputs and held tensors that the graph writes to."""
    bindings = (traced.bindings[node.name] for node in written_placeholders(traced.graph))
    return frozenset((binding.kind, binding.name) for binding in bindings)


def _inputs(traced: TracedGraph, written: frozenset[tuple[str, str]]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "path": leaf.path,
            "spec": None if leaf.spec is None else str(leaf.spec),
            "value": leaf.value,
            "same_as": leaf.same_as,
            "written": ("input", leaf.path) in written,
        }
        for leaf in traced.inputs
    )


def _binding(binding: Any, written: frozenset[tuple[str, str]]) -> dict[str, Any]:
    return {
        "kind": binding.kind,
        "name": binding.name,
        "spec": str(binding.spec),
        "aliases": list(binding.aliases),
        "persistent": binding.is_persistent,
        **({"parts": [list(part) for part in binding.parts]} if binding.parts else {}),
        **({"written": True} if binding.is_static and (binding.kind, binding.name) in written else {}),
    }


def _region(region: Any) -> dict[str, Any]:
    return {
        "kind": region.kind,
        "piece": region.piece,
        "arguments": list(region.arguments),
        "results": list(region.results),
        "symbols": list(region.symbols),
        "calls": [_call(call) for call in region.calls],
    }


def _call(call: OpaqueCall) -> dict[str, Any]:
    plain = {"operator": call.operator, "arguments": call.arguments, "results": call.results}
    return plain | ({"specs": list(call.specs)} if any(call.specs) else {})


def _module_of(name: str) -> str:
    """Return the module that must be imported before a program that calls the operator is bound."""
    short = name.partition(".")[0]
    declared = registry.get(short)
    return declared.module if declared is not None else module_of_operator(short) or ""


def _constants(traced: TracedGraph, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what the weights' files do not hold: non-persistent buffers, and tensors met in the code."""
    found = {name: value.detach().contiguous().clone() for name, value in traced.constants.items()}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for binding in traced.bindings.values():
        if binding.kind == "buffer" and not binding.is_persistent:
            found[binding.name] = buffers[binding.name].detach().contiguous().clone()
    return found


def read_constants(data: bytes, device: str) -> dict[str, torch.Tensor]:
    """Read the tensors that a record carries itself, onto the type of device that its program runs on."""
    return {name: tensor.to(device) for name, tensor in load(data).items()} if data else {}
