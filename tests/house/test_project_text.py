"""Project files speak of the project alone: no place of any one machine, no registry's host, no tracker's numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from house.source_tree import ROOT, python_files, short

# Put together from halves, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a path of one machine": ["/wo" + r"rk/", "/ro" + r"ot/", "/tm" + r"p/w/", "/opt/wh" + "eels"],
    "a registry's host": [
        "py" + r"pi\.org", "python" + r"hosted\.org", r"registry\." + "npmjs", r"download\." + "pytorch",
    ],
    "a number of the tracker": [r"\b[Ii]ssues? #?\d+\b", r"(?<![\w&`\"'])#\d+\b"],
    "a tool outside the project": [r"\bfa" + r"rm[-_]\w+", r"\bissu" + r"es show\b"],
    "a page outside the project": [
        r"\bsha" + r"red/", "spi" + r"kes/", r"feasi" + r"bility\.md", "ecosy" + r"stem\.md", r"\bca" + r"ses\.md",
    ],
}  # fmt: skip
NAMES = ("*.md", "*.toml", "*.txt", "*.yml", "Makefile", ".gitignore")


def project_files() -> list[Path]:
    """List the text files of the project."""
    top = {path for name in NAMES for path in ROOT.glob(name)}
    below = {path for folder in ("docs", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()}
    return sorted(top | below | set(python_files()))


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_files_speak_of_the_project_alone(kind: str) -> None:
    pattern = re.compile("|".join(FORBIDDEN[kind]))
    found = set()
    for path in project_files():
        if path.suffix not in {".png", ".bin", ".safetensors"}:
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if pattern.search(line):
                    found.add(f"{short(path)}:{number} {line.strip()[:100]}")
    assert found == set()


def test_lines_are_short_enough_to_read() -> None:
    long = {
        f"{short(path)}:{number}"
        for path in ROOT.glob("docs/**/*.md")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 160 and not line.startswith("|")
    }
    assert long == set()


def test_the_licence_is_the_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_constraints_pin_everything() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.+]+", line)] == []
