"""Check that what the pages point at is there: links, files, modules, public names, make targets, commands.

A page that names what has gone is worse than no page. This reads every Markdown file of the project and looks up what
stands in links and in backticks; it imports nothing of ours, so it also runs where torch is missing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$", re.MULTILINE)
FOLDERS = ("src/", "docs/", "tests/", "scripts/", "benchmarks/", "examples/", ".ci/", "piecework/")


@dataclass(frozen=True)
class Fault:
    """One reference that leads nowhere."""

    page: Path
    reference: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}: `{self.reference}` {self.reason}"


def anchor_of(heading: str) -> str:
    """Make the anchor that a heading gets on a page."""
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return plain.strip().replace(" ", "-")


def check_links(page: Path, text: str) -> Iterator[Fault]:
    """Look up every relative link of a page, and its anchor."""
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        if not linked.exists():
            yield Fault(page, target, "is not there")
        elif anchor and linked.suffix == ".md":
            headings = {anchor_of(heading) for heading in HEADING.findall(linked.read_text())}
            if anchor not in headings:
                yield Fault(page, target, f"has no heading `#{anchor}`")


def names_of(path: Path) -> set[str]:
    """List what a Python file defines at its top, and the members of its classes."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{member.name}")
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    found.add(f"{node.name}.{member.target.id}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def public_names() -> dict[str, str]:
    """Read which names `import piecework` gives, each with the module that it comes from."""
    path = ROOT / "src/piecework/__init__.py"
    if not path.is_file():
        return {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict) and node.keys:
            try:
                table = ast.literal_eval(node)
            except ValueError:
                continue
            if all(isinstance(part, str) for pair in table.items() for part in pair):
                return dict(table)
    return {}


def resolves(dotted: str, public: dict[str, str]) -> bool:
    """Tell whether a dotted name under `piecework` is a package, a module, or something that one defines."""
    parts = dotted.split(".")
    folder = ROOT / "src"
    for depth in range(len(parts), 0, -1):
        path = folder.joinpath(*parts[:depth])
        rest = ".".join(parts[depth:])
        if path.with_suffix(".py").is_file():
            return not rest or rest in names_of(path.with_suffix(".py"))
        if path.is_dir():
            if not rest:
                return True
            if depth == 1 and parts[1] in public:
                return True
            initial = path / "__init__.py"
            return initial.is_file() and rest in names_of(initial)
    return False


def check_code(page: Path, text: str, public: dict[str, str], targets: set[str]) -> Iterator[Fault]:
    """Look up every backticked file, module, public name and make target of a page."""
    for code in CODE.findall(FENCE.sub("", text)):
        if re.fullmatch(r"piecework(\.\w+)+", code) and not resolves(code, public):
            yield Fault(page, code, "names nothing in the package")
        elif (used := re.match(r"pw\.(\w+)", code)) and public and used[1] not in public:
            yield Fault(page, code, "is no public name of the package")
        elif code.startswith(FOLDERS) and re.fullmatch(r"[\w./-]+", code):
            candidates = (ROOT / code, ROOT / "src" / code)
            if not any(candidate.exists() for candidate in candidates):
                yield Fault(page, code, "is no file of the project")
        elif (made := re.match(r"make ([\w-]+)$", code)) and made[1] not in targets:
            yield Fault(page, code, "is no target of the Makefile")


def pages() -> list[Path]:
    """List the Markdown pages of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def navigation_faults() -> Iterator[Fault]:
    """Compare the navigation of mkdocs.yml with the pages: each listed page exists, each page is listed."""
    config = ROOT / "mkdocs.yml"
    listed = set(re.findall(r":\s+([\w/-]+\.md)\s*$", config.read_text(), re.MULTILINE))
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    for name in sorted(listed - there):
        yield Fault(config, name, "is no page under docs/")
    for name in sorted(there - listed):
        yield Fault(config, name, "is not in the navigation")


def find_faults() -> list[Fault]:
    """Check all pages and return what leads nowhere."""
    public = public_names()
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    faults: list[Fault] = []
    for page in pages():
        text = page.read_text()
        faults += check_links(page, text)
        faults += check_code(page, text, public, targets)
    faults += navigation_faults()
    return [Fault(fault.page.relative_to(ROOT), fault.reference, fault.reason) for fault in faults]


def main() -> int:
    """Print what leads nowhere; 1 if anything does."""
    faults = find_faults()
    for fault in faults:
        print(fault)
    print(f"{len(pages())} pages, {len(faults)} references that lead nowhere")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
