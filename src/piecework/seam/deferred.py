"""Leave out, until something asks for it, what `import torch` runs and a warm start has no use for.

A quarter of torch's import describes its operators to compilers and to tensors without storage. A start that runs what
is compiled already needs none of that. Each module named here stands in its place, empty, and runs the moment one of
its names is asked for; all of them run before the first module that traces or compiles is imported, and before
Transformers is, so that whoever traces finds what torch's own import would have left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from piecework.seam.preload import torch_folder

# `_meta_registrations` acts by being run, so it has to run before anybody traces; the others hold names only.
_DEFERRED = ("torch._meta_registrations", "torch.distributions", "torch.optim", "torch.quantization")
# Who needs them all: each way into tracing, fake tensors or compiling passes through one of these.
_NEED_ALL = ("torch._dynamo", "torch._inductor", "torch._decomp", "torch._refs", "torch._prims", "transformers")
# Releases whose import was run with these modules left out. In any other, everything is imported as torch means it.
_RELEASES = ("2.13.",)

_lock = threading.RLock()


class _Deferred(ModuleType):
    """A module that has not run yet."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") or name == "__all__":  # the others are the import system's own questions
            _run(self)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module `{self.__name__}` has no attribute `{name}`") from None


class _Later(Loader):
    """Loads a module by leaving it as it is; the loader that can run it waits beside it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _After(Loader):
    """Runs a module after all that waits."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        spec.loader = self.loader
        run_deferred()
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        self.loader.exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules that wait, and those that need them: to ask where one lies runs nothing."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        kind = _Later if name in _DEFERRED else _After if name in _NEED_ALL else None
        if kind is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = kind(spec.loader)
        return spec


_finder = _Finder()


def defer_torch() -> bool:
    """Have torch's import leave those modules out; say whether it will. A torch that is imported stays as it is."""
    if "torch" in sys.modules or _finder in sys.meta_path or not _release().startswith(_RELEASES):
        return False
    sys.meta_path.insert(0, _finder)
    return True


def run_deferred() -> None:
    """Run all that waits, as torch's own import would have done, and leave nothing out from now on."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in deferred():
        _run(sys.modules[name])


def deferred() -> tuple[str, ...]:
    """Return the names of the modules that wait."""
    return tuple(name for name in _DEFERRED if name in sys.modules and _waits(sys.modules[name]) is not None)


def _waits(module: ModuleType) -> _Later | None:
    loader = module.__spec__.loader if module.__spec__ is not None else None
    return loader if isinstance(loader, _Later) else None


def _run(module: ModuleType) -> None:
    with _lock:  # a second thread waits here until the module has run; the first comes by again from inside of it
        later, spec = _waits(module), module.__spec__
        if later is None or spec is None:
            return
        spec.loader = module.__loader__ = later.loader
        later.loader.exec_module(module)


def _release() -> str:
    folder = torch_folder()
    try:
        lines = (folder / "version.py").read_text().splitlines() if folder is not None else []
    except OSError:
        return ""
    named = (line.partition("=")[2].strip(" '\"") for line in lines if line.startswith("__version__"))
    return next(named, "")
