"""Pages name only what is there, and the check of that finds what is not."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import piecework
from house.source_tree import ROOT


@pytest.fixture(scope="module")
def checker() -> dict[str, Any]:
    """Load the script as a module would be."""
    return runpy.run_path(str(ROOT / "scripts/check_docs.py"))


def test_every_reference_leads_somewhere(checker: dict[str, Any]) -> None:
    assert [str(fault) for fault in checker["find_faults"]()] == []


def test_what_leads_nowhere_is_found(checker: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# A page\n\n[here](#a-page) [gone](gone.md) [web](https://example.org) [no heading](#b)\n"
    text += "`piecework.errors.PieceworkError` `piecework.errors.Nothing` `src/nothing.py`\n"
    text += "`pw.nothing` `make nothing`\n"
    text += "```\n`piecework.nothing`\n```\n"
    page.write_text(text)
    faults = list(checker["check_links"](page, text))
    faults += checker["check_code"](page, text, {"compile": "piecework.api"}, {"test"})
    assert [fault.reference for fault in faults] == [
        "gone.md", "#b", "piecework.errors.Nothing", "src/nothing.py", "pw.nothing", "make nothing",
    ]  # fmt: skip


def test_every_public_name_has_its_reference() -> None:
    pages = [page.read_text() for page in (ROOT / "docs/reference").glob("*.md")]
    shown = set(re.findall(r"^::: (piecework[\w.]*)$", "\n".join(pages), re.MULTILINE))
    places = vars(piecework)["_PLACES"]
    wanted = {
        path if path.endswith(f".{name}") and name in ("errors", "events") else f"{path}.{attribute or name}"
        for name, place in places.items()
        for path, _, attribute in [place.partition(":")]
    }
    assert shown == wanted
