"""The command line's own words, as a person sees them: a change of a flag or a sentence shows in a diff."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from house.source_tree import GOLDEN, PACKAGE

if not (PACKAGE / "cli" / "main.py").is_file():
    pytest.skip("piecework.cli.main is not written yet", allow_module_level=True)

COMMANDS = (
    "generate", "build", "explain", "dump", "check", "bisect", "doctor", "bench", "trace", "store", "serve", "prewarm",
)  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a terminal of 100 columns without colours."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIECEWORK_")}
    environment |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, "-m", "piecework.cli.main", *arguments],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip


def plain(text: str) -> str:
    """Drop what depends on the machine: trailing blanks and escape sequences."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_help(compare_golden: Callable[[Path, str], None]) -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert {command for command in COMMANDS if command not in done.stdout} == set()
    compare_golden(GOLDEN / "help.txt", plain(done.stdout))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, compare_golden: Callable[[Path, str], None]) -> None:
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    compare_golden(GOLDEN / f"help_{command}.txt", plain(done.stdout))


def test_help_needs_no_torch() -> None:
    code = "import sys\nfrom piecework.cli import main\ntry:\n main.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print('TORCH' if 'torch' in sys.modules else 'FREE')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "FREE", done.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    done = run("no-such-command")
    assert done.returncode == 2
    assert "no-such-command" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
