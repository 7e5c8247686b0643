"""What a record tells of its artifacts beside their keys: what fell back, and that none was tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.store.protocol import ARTIFACT, Store
from piecework.values.verdict import Check, let_pass


def notes_of(artifacts: Mapping[tuple[int, str], str], store: Store, check: Check) -> dict[str, Any]:
    """Return what the record that names the artifacts tells of them: what fell back, and that none was tried."""
    lost = fallen(artifacts, store)
    return ({"fall_backs": lost} if lost else {}) | ({"unverified": True} if check is let_pass else {})


def fallen(artifacts: Mapping[tuple[int, str], str], store: Store) -> list[dict[str, Any]]:
    """Return what runs otherwise than the compiler was asked for, and why, for the record that names the artifacts."""
    found = []
    for (number, box), key in artifacts.items():
        facts = store.read_record(ARTIFACT, key)["facts"]
        if facts.get("fall_back"):
            what = f"piece {number} at {box} runs otherwise than asked for"
            found.append({"what": what, "reason": str(facts["fall_back"]), "budget_s": facts.get("budget_s", 0)})
    return found
