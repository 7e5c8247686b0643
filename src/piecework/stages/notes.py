"""What a record tells of its artifacts beside their keys: what fell back, and that none was tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from piecework.events import CutInside, FallBack, Observer
from piecework.seam.kinds import operator_name
from piecework.seam.loader import regions_of
from piecework.seam.waits import is_collective
from piecework.store.protocol import ARTIFACT, Store
from piecework.values.artifact import Artifact
from piecework.values.graph import BY_COMPILER, OPAQUE, Plan
from piecework.values.placement import ranks_of
from piecework.values.signature import TensorSpec
from piecework.values.verdict import Check, let_pass


def notes_of(artifacts: Mapping[tuple[int, str], str], store: Store, check: Check) -> dict[str, Any]:
    """Return what the record that names the artifacts tells of them: what fell back, and that none was tried."""
    lost = fallen(artifacts, store)
    return ({"fall_backs": lost} if lost else {}) | ({"unverified": True} if check is let_pass else {})


def tell_cuts(artifacts: Mapping[tuple[int, str], str], plan: Plan, store: Store, observer: Observer) -> None:
    """Say how what was compiled of a whole graph is cut, where that is asked for; and where it has no text to cut."""
    if plan.partition != BY_COMPILER or not plan.inside:
        return
    for (number, box), key in artifacts.items():
        record = store.read_record(ARTIFACT, key)
        whole = Artifact(record["kind"], store.read_blob(record["text"]).decode())
        regions = regions_of(whole, plan.inside)
        opaque = sum(region.kind == OPAQUE for region in regions)
        if regions:
            observer(CutInside(piece=f"piece {number}", range=box, regions=len(regions), opaque=opaque))
        else:
            reason = f"an artifact of kind `{whole.kind}` has no text to cut: it is captured `full` or not at all"
            observer(FallBack(what=f"piece {number} at {box} stays whole", reason=reason))


def fallen(artifacts: Mapping[tuple[int, str], str], store: Store) -> list[dict[str, Any]]:
    """Return what runs otherwise than the compiler was asked for, and why, for the record that names the artifacts."""
    found = []
    for (number, box), key in artifacts.items():
        facts = store.read_record(ARTIFACT, key)["facts"]
        if facts.get("fall_back"):
            what = f"piece {number} at {box} runs otherwise than asked for"
            found.append({"what": what, "reason": str(facts["fall_back"]), "budget_s": facts.get("budget_s", 0)})
    return found


def collectives_in(graph: fx.Graph) -> list[dict[str, Any]]:
    """Return the collectives of a graph, equal ones once with their count: operator, ranks, and what each gives."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for node in graph.nodes:
        spec = node.meta.get("spec")
        ranks = next((n for arg in node.args if isinstance(arg, str) and (n := ranks_of(arg))), 0)
        if is_collective(node) and isinstance(spec, TensorSpec) and ranks:
            counts[operator_name(node).partition(".")[0], ranks, spec.dtype, spec.shape] += 1
    names = ("operator", "ranks", "dtype", "shape")
    return [{**dict(zip(names, each, strict=True)), "shape": list(each[3]), "count": n} for each, n in counts.items()]
