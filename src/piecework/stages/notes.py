"""What a record tells of its artifacts beside their keys: what fell back, and that none was tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.events import CutInside, FallBack, Observer
from piecework.seam.loader import regions_of
from piecework.store.protocol import ARTIFACT, Store
from piecework.values.artifact import Artifact
from piecework.values.graph import BY_COMPILER, OPAQUE, Plan
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
