"""The tutorial's commands, run as they stand on a tiny model, give what the page says that they give."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.command import llama_folder

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "six_steps.md"
STEP = re.compile(r"^## (\d+\. [^\n]*)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A real compiler would take minutes: the page's commands get the one that runs each piece as it stands.
COMMAND = """#!/bin/sh
command=$1; shift
exec "{python}" -m piecework.cli.main "$command" "$@" --compiler eager --max-num-batched-tokens 64
"""


def steps() -> list[tuple[str, str, str]]:
    """Read each step's name, its commands, and what the page says that they print."""
    found = []
    for name, text in STEP.findall(PAGE.read_text()):
        (_, commands), (_, printed) = BLOCK.findall(text)
        found.append((name, commands, printed))
    return found


def pattern(printed: str) -> re.Pattern[str]:
    """Turn the page's output into a pattern: `…` in a line is any text, as a line any lines."""
    lines = [
        r"(?:[^\n]*\n)*" if line == "…" else re.escape(line).replace("…", "[^\n]*") + r"\n"
        for line in printed.splitlines()
    ]
    return re.compile("".join(lines))


def test_the_page_has_six_steps() -> None:
    assert [name.partition(".")[0] for name, _, _ in steps()] == list("123456")


def test_patterns_match_what_they_should() -> None:
    assert pattern("took … s\n…\n").fullmatch("took 1.2 s\nmore\nlines\n")
    assert not pattern("took … s\n").fullmatch("took 1.2 s\nmore\n")
    assert not pattern("took … s\n").fullmatch("took 1.2 ms\n")


@pytest.mark.slow
def test_the_commands_print_what_the_page_says(tmp_path: Path) -> None:
    model, tools = llama_folder(tmp_path / "model"), tmp_path / "tools"
    tools.mkdir()
    (tools / "piecework").write_text(COMMAND.format(python=sys.executable))
    (tools / "piecework").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIECEWORK_", "TORCH_"))}
    environment = {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    tokens = set()
    for name, commands, printed in steps():
        script = commands.replace("MODEL", str(model)).replace("STORE", str(tmp_path / "store"))
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        out = done.stdout.replace(str(tmp_path / "store"), "STORE")
        assert pattern(printed).fullmatch(out), f"{name}\n{out}\n{done.stderr}"
        assert done.returncode == 0, name
        tokens |= set(re.findall(r"^(?:w\d+)+$", out, re.MULTILINE))
    assert len(tokens) == 1  # with and without compilation
