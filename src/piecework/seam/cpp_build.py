"""Build a piece's C++ kernels: lowered one at a time, built side by side."""

from __future__ import annotations

import contextlib
import functools
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from piecework.seam.binary import blank_paths, cut_sections
from piecework.seam.cpp_header import CppBuildError, CppHeaders, command_words
from piecework.seam.cpp_source import CppKernel, argument_types
from piecework.span_events import sub_phase

_WORTH_A_HEADER = 8  # sources from which on precompiling the header costs less than reading it in each


@contextlib.contextmanager
def record_cpp_kernels() -> Iterator[None]:
    """Let Inductor hand over the source of each C++ kernel in place of building it at once.

    Its own way is one process and one reading of the headers for every kernel, each waited for; there is no setting
    for another, so this one method of it stands aside while a piece is lowered.
    """
    from torch._inductor.async_compile import AsyncCompile

    original = AsyncCompile.cpp_pybinding

    def record(self: Any, argtypes: list[str], source_code: str, *_: Any, **__: Any) -> CppKernel:
        return CppKernel(argument_types(argtypes), source_code)

    AsyncCompile.cpp_pybinding = record  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = original  # type: ignore[method-assign]


def build_command() -> str:
    """Return the compiler's command line, `SOURCE` and `OUTPUT` for its files; call it under Inductor's settings."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", include_pytorch=False, shared=True)
    command = CppBuilder(name="OUTPUT", sources="SOURCE", BuildOption=options).get_command_line()
    torch_folder = Path(torch.__file__).parent
    # Messages of failed checks name their source: by a path that is the same wherever torch is installed.
    maps = f" -ffile-prefix-map={shlex.quote(str(torch_folder))}=torch -Wl,--build-id=none"
    return str(command) + maps


class CppBuilds:
    """C++ builds of one compiler; `expect` says how many there will be: headers are precompiled where that pays."""

    def __init__(self, headers: CppHeaders) -> None:
        self._headers = headers
        self._expected = 0
        self._built: dict[tuple[str, str], bytes] = {}
        self._once = threading.Lock()

    def expect(self, count: int) -> None:
        """Say how many sources will be built; a header that was begun for more than that is dropped."""
        self._expected = count
        if 0 < count < _WORTH_A_HEADER:
            self._headers.drop()
        else:
            self._headers.hurry()

    def build_once(self, source: str, command: str, folder: str) -> bytes:
        """Build a library that many pieces use, which reads no header of torch's."""
        with self._once:
            if (source, command) not in self._built:
                self._built[source, command] = self._build(source, command, folder)
            return self._built[source, command]

    def build(self, source: str, command: str, folder: str) -> bytes:
        """Build a shared library of `source` with `command`, in a folder of its own under `folder`."""
        if self._expected < _WORTH_A_HEADER:
            return self._build(source, command, folder)
        header = self._headers.get(command, folder)
        return self._build(source, command, folder, ("-include", str(header)), (str(header.parent),))

    def _build(
        self, source: str, command: str, folder: str, more: Sequence[str] = (), blanked: Sequence[str] = ()
    ) -> bytes:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            (Path(place) / "kernels.cpp").write_text(source)
            _run([*command_words(command, "kernels.cpp", "kernels.so"), *more], place)
            data = (Path(place) / "kernels.so").read_bytes()
        return blank_paths(cut_sections(data), (folder, place, str(Path(torch.__file__).parent), *blanked))


def _run(words: list[str], folder: str) -> None:
    with sub_phase("C++", f"{Path(words[0]).name} kernels.so"):
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise CppBuildError(done.stderr or done.stdout or f"{words[0]} ended with {done.returncode}")


def trust_processor() -> None:
    """Let Inductor take the vector instructions that the processor has for those that the C++ compiler can build.

    It asks the compiler for each by building a library: ten processes and several seconds. A compiler that lacks one
    fails at the first kernel, and is asked then.
    """
    from torch._inductor import cpu_vec_isa

    rare = getattr(getattr(cpu_vec_isa, "VecAMX", None), "_amx_fp16_code", None)  # needs the newest compilers
    original = cpu_vec_isa.VecISA.check_build
    cpu_vec_isa.VecISA.check_build = lambda self, code: code is not rare  # type: ignore[method-assign]
    try:
        cpu_vec_isa.pick_vec_isa()
    finally:
        cpu_vec_isa.VecISA.check_build = original  # type: ignore[method-assign]


def ask_compiler() -> None:
    """Forget what was trusted, so that the C++ compiler is asked for each kind of vector instruction."""
    from torch._inductor import cpu_vec_isa

    for value in (cpu_vec_isa.valid_vec_isa_list, cpu_vec_isa.pick_vec_isa, *_answers(cpu_vec_isa)):
        clear = getattr(value, "cache_clear", None)
        if clear is not None:
            clear()


@functools.cache
def _answers(module: Any) -> tuple[Any, ...]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, module.VecISA)]
    return tuple(value for kind in kinds for value in vars(kind).values() if hasattr(value, "cache_clear"))
