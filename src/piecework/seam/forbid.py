"""See every compile in the process, in any thread, and forbid them for a while.

Nothing of the compiler is imported for it: what is watched is marked when it is imported, by whom ever. Compilers that
run as processes (a C++ compiler, `ptxas`) are seen by Python's audit events. A mark costs one comparison a compile.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import PurePath
from types import CodeType, ModuleType
from typing import Any

from piecework.errors import CompileForbidden

# Module, function in it, what it is: each is passed by every compile of its kind, and looked up when it is called.
_WATCHED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "torch._dynamo.convert_frame": (("_compile", "Dynamo"),),
    "torch._functorch.aot_autograd": (("create_aot_state", "AOTAutograd"),),
    "torch._inductor.compile_fx": (("_compile_fx_inner", "Inductor"),),
    "torch._inductor.runtime.triton_heuristics": (("CachingAutotuner.benchmark_all_configs", "Inductor autotune"),),
    "triton.compiler.compiler": (("compile", "Triton"),),
    "triton.compiler": (("compile", "Triton"),),
    "triton.runtime.autotuner": (("Autotuner._bench", "Triton autotune"),),
    "deep_gemm.jit.compiler": (("build", "DeepGEMM"), ("Compiler.build", "DeepGEMM")),
}
# `ninja` is what builds C++ extensions run their compiler by: as a grandchild, it is not seen itself.
_COMPILERS = re.compile(
    r"(?:[\w.-]+-)?(?:g\+\+|gcc|c\+\+|cc|clang(?:\+\+)?|nvcc|hipcc|ptxas|icpx|ninja)(?:-[\d.]+)?"
)
_MARK = "_piecework_watched"


@dataclass(frozen=True)
class Compile:
    """A compile that is about to happen: by what, and of what as far as that is known."""

    kind: str
    what: str = ""


Listener = Callable[[Compile], None]


class _Watch:
    """Counts compiles by kind, and raises while any block forbids them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._forbidden = 0
        self._listeners: list[Listener] = []
        self._installed = False
        self._lock = threading.Lock()

    def install(self) -> None:
        """Begin to watch; from then on for the life of the process."""
        with self._lock:
            if self._installed:
                return
            self._installed = True
        sys.addaudithook(self._audit)
        sys.meta_path.insert(0, _Finder(self))
        for name in _WATCHED:
            if name in sys.modules:
                self.mark(sys.modules[name])

    def mark(self, module: ModuleType) -> None:
        """Put a mark on what is watched in a module."""
        for path, kind in _WATCHED[module.__name__]:
            class_name, _, function_name = path.rpartition(".")
            owner = getattr(module, class_name, None) if class_name else module
            function = getattr(owner, function_name, None)
            if owner is None or not callable(function) or hasattr(function, _MARK):
                continue
            # What a class method is bound to has to stay its first argument.
            is_bound = isinstance(owner, type) and isinstance(vars(owner).get(function_name), classmethod)
            marked: Any = self._marked(function.__func__ if is_bound else function, kind)
            setattr(owner, function_name, classmethod(marked) if is_bound else marked)

    def _marked(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.note(kind, _subject(args))
            return function(*args, **kwargs)

        setattr(watched, _MARK, True)
        return watched

    def _audit(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and values:
            words = [values[0], *(values[1] if isinstance(values[1], list | tuple) else [values[1]])]
            names = [PurePath(_text(word).split(" ")[0]).name for word in words[:2] if word]
            found = next((name for name in names if _COMPILERS.fullmatch(name)), None)
            if found is not None:
                self.note(found, _text(words[-1])[-100:])

    def note(self, kind: str, what: str = "") -> None:
        """Count one compile, tell those who listen, and raise where it is forbidden now."""
        self.counts[kind] += 1
        for listener in tuple(self._listeners):
            listener(Compile(kind, what))
        if self._forbidden:
            raise CompileForbidden(
                f"`{kind}` was about to compile while compiling is forbidden",
                hint="a call left what was compiled: a size outside the ranges, a function under torch.compile, or a "
                "Triton kernel that was never run; compile it before, or leave the `no_compile()` block",
                facts={"kind": kind, "thread": threading.current_thread().name},
            )

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Tell a listener of each compile until the block ends."""
        self.install()
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    @property
    def is_forbidding(self) -> bool:
        """Whether any block is open that forbids compiling."""
        return self._forbidden > 0

    @contextmanager
    def forbid(self) -> Iterator[None]:
        """Raise in every thread at each compile until the block ends."""
        self.install()
        with self._lock:
            self._forbidden += 1
        try:
            yield
        finally:
            with self._lock:
                self._forbidden -= 1


class _Finder(importlib.abc.MetaPathFinder):
    """Marks watched modules when they are imported; finds nothing itself."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self._busy = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders give, its loader followed by our mark."""
        if fullname not in _WATCHED or getattr(self._busy, "on", False):
            return None
        self._busy.on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.on = False
        if spec is not None and spec.loader is not None:
            spec.loader = _MarkingLoader(spec.loader, self._watch)
        return spec


class _MarkingLoader(importlib.abc.Loader):
    """Loads as another loader does, then marks the module."""

    def __init__(self, loader: Any, watch: _Watch) -> None:
        self._loader = loader
        self._watch = watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as the other loader does."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then mark what is watched in it."""
        self._loader.exec_module(module)
        self._watch.mark(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _subject(args: tuple[Any, ...]) -> str:
    """Say what is compiled, from the arguments of whoever compiles it: a function's code, a kernel and its types."""
    for value in args[:2]:
        if isinstance(value, CodeType):
            return f"{value.co_qualname} at {PurePath(value.co_filename).name}:{value.co_firstlineno}"
        kernel = getattr(value, "fn", None)
        if kernel is not None:
            name = getattr(kernel, "__name__", "") or type(kernel).__name__
            types = getattr(value, "signature", None)
            return f"{name} {dict(types)}"[:300] if isinstance(types, Mapping) else str(name)
    return ""


def _text(word: Any) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)


_watch = _Watch()


def is_forbidden() -> bool:
    """Tell whether compiling is forbidden now, by any thread."""
    return _watch.is_forbidding


@contextmanager
def forbid_compilation() -> Iterator[None]:
    """Make every compile in the process raise CompileForbidden, in every thread, until the block ends."""
    with _watch.forbid():
        yield


@contextmanager
def count_compilation() -> Iterator[Counter[str]]:
    """Count compiles by kind (`Dynamo`, `AOTAutograd`, `Inductor`, `Triton`, a compiler's name) during the block.

    The counter is filled when the block ends.
    """
    _watch.install()
    before = Counter(_watch.counts)
    found: Counter[str] = Counter()
    try:
        yield found
    finally:
        found.update(_watch.counts - before)


@contextmanager
def watch_compilation(listener: Listener) -> Iterator[None]:
    """Call a listener, in the thread that compiles, before each compile in the process, until the block ends."""
    with _watch.listen(listener):
        yield
