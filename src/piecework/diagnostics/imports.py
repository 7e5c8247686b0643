"""See what imports cost: a span for each package, with the packages that it imports in turn inside it.

Python's own library belongs to whoever imports it. A package of ours is told of module by module.
"""

from __future__ import annotations

import importlib.abc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import ModuleType
from typing import Any

from piecework.events import Observer
from piecework.span_events import Imported
from piecework.spans import open_span, spanning

_OURS = "piecework"
_LEAST_NS = 100_000  # of a module of ours: there are many, and most take no time
_LOADERS = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)  # each of their objects loads one module


class ImportClock(importlib.abc.MetaPathFinder):
    """Tell `observer` of each package that is imported inside `with clock:`, in any thread; finds nothing itself."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._here = threading.local()

    def __enter__(self) -> ImportClock:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders give; its loader is timed once, and is otherwise what it was."""
        if getattr(self._here, "is_busy", False):
            return None
        self._here.is_busy = True
        try:
            spec = _find(self, fullname, path, target)
        finally:
            self._here.is_busy = False
        if spec is not None and type(spec.loader) in _LOADERS:
            self._time(spec.loader, _package(fullname))
        return spec

    def _time(self, loader: Any, package: str) -> None:
        run: Callable[[ModuleType], None] = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            with self._importing(package):
                run(module)

        loader.exec_module = exec_module

    @contextmanager
    def _importing(self, package: str) -> Iterator[None]:
        open_packages: list[list[Any]] = self._here.__dict__.setdefault("packages", [])
        # Of two spans that are open, the package's may be the outer one: a phase began while it was imported.
        is_inside = bool(open_packages) and open_packages[-1][0] == package and open_packages[-1][2] == open_span()
        if not package or is_inside:
            if is_inside:
                open_packages[-1][1] += 1
            yield
            return
        start_ns, modules = time.perf_counter_ns(), 1
        try:
            with spanning(self._observer) as span:
                open_packages.append([package, 1, span])
                try:
                    yield
                finally:
                    modules = open_packages.pop()[1]
        finally:
            if not package.startswith(_OURS) or time.perf_counter_ns() - start_ns >= _LEAST_NS:
                self._observer(Imported(package=package, modules=modules, start_ns=start_ns, span=span))


def _find(clock: ImportClock, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        if finder is not clock and hasattr(finder, "find_spec"):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
    return None


def _package(fullname: str) -> str:
    """Return what a module is told of as; nothing where it belongs to whoever imports it."""
    top = fullname.partition(".")[0]
    if top == _OURS:
        return fullname
    return "" if top in sys.stdlib_module_names else top
