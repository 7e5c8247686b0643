"""What pages show as `python` runs as it stands; a fragment is marked `py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from house.source_tree import PACKAGE, ROOT

PAGES = (
    "README.md", "docs/walkthrough.md", "docs/python.md", "docs/store.md", "docs/report.md",
    "docs/tutorial/three_launches.md",
)  # fmt: skip
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page: str) -> list[str]:
    """Read the Python blocks of a page."""
    return PYTHON_BLOCK.findall((ROOT / page).read_text())


def test_the_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    first = re.search(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make demo", "make test"]
    assert len(text[: first.start()].splitlines()) < 4


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    if not (PACKAGE / "__init__.py").is_file():
        pytest.skip("piecework/__init__.py is not written yet")
    script = tmp_path / "snippet.py"
    script.write_text("\n\n".join(snippets(page)))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:piecework", script.name],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
