"""Hooks of the site's build: a link to a file of the project that is no page shows that file as one.

Pages link to examples, tests and the pages at the project's root. On the site each of those is a page of its own, under
`project/`, made when the site is built; there is no second copy to keep true.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\[[^\]]*\]\()((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?\))")
FENCE = "`" * 4
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash", ".toml": "toml"}


def outside(page: str, target: str) -> str:
    """Return the project path that a link on a page under docs/ leads to, or nothing where it stays inside docs/."""
    path = normpath(f"docs/{PurePosixPath(page).parent}/{target}")
    return "" if path.startswith(("docs/", "..")) else path


def address(path: str) -> str:
    """Name the page that shows a file or folder of the project."""
    return f"project/{path}" if path.endswith(".md") else f"project/{path}.md"


def shown(path: str) -> str:
    """Write the page that shows a file or folder of the project."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(one for one in place.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
        return f"# `{path}`\n\n" + "".join(f"- `{one.relative_to(ROOT)}`\n" for one in names)
    if place.suffix == ".md":
        return place.read_text()
    return f"# `{path}`\n\n{FENCE}{LANGUAGES.get(place.suffix, 'text')}\n{place.read_text()}{FENCE}\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file that pages link to and that lies outside docs/, and for what those link to in turn."""
    wanted = {
        path
        for file in files.documentation_pages()
        for _, target, _ in LINK.findall(file.content_string)
        if (path := outside(file.src_uri, target))
    }
    for path in sorted(wanted):
        if (ROOT / path).exists():
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, address(path), content=shown(path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links that leave docs/ to the pages that show what they name; and those of root pages back into docs/."""
    here = page.file.src_uri
    if here.startswith("project/"):
        back = re.compile(r"(\]\()((?:docs/)?)([\w./-]+?)((?:#[^)\s]*)?\))")
        return back.sub(lambda found: found[1] + from_root(here, found[2], found[3]) + found[4], markdown)

    def moved(found: re.Match[str]) -> str:
        path = outside(here, found[2])
        return found[0] if not path else found[1] + relpath(address(path), str(PurePosixPath(here).parent)) + found[3]

    return LINK.sub(moved, markdown)


def from_root(page: str, folder: str, name: str) -> str:
    """Rewrite a link of a page that lies at the project's root, which the site shows under `project/`."""
    target = name if folder else address(name)
    return relpath(target, str(PurePosixPath(page).parent))
