"""What turns a graph into code here: releases, architecture and instruction set, as named factors."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from piecework.errors import OptionError
from piecework.seam.probe import processor_flags
from piecework.values.digest import digest_bytes, digest_text


def toolchain(device: str) -> dict[str, str]:
    """Return the factors of the toolchain for a device type, without starting a compiler."""
    factors = {
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "device": device.partition(":")[0],
        # What a tensor made without a dtype gets: read while tracing and while compiling.
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    if factors["device"] == "cuda":
        refuse_absent(device)
        major, minor = torch.cuda.get_device_capability(torch.device(device))
        return factors | {"arch": f"sm_{major}{minor}", "cuda": str(torch.version.cuda), "triton": _release("triton")}
    # Kernels are built for this very processor, so all the instructions that it knows stand in the key.
    flags = digest_text(" ".join(sorted(processor_flags())))[:16]
    arch = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"
    return factors | {"arch": arch, "os": platform.system()}


def refuse_absent(device: str) -> None:
    """Say so where a GPU is not here: kernels are tuned on one of the architecture that they are for."""
    if torch.device(device).type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise OptionError(
            "torch finds no CUDA device here",
            hint="`--device cpu`, or a machine with a GPU of the architecture that will serve: what is built for a GPU "
            "is built on one like it",
        )
    index = torch.device(device).index or 0
    if index >= count:
        last = f"`cuda:{count - 1}`" if count > 1 else "`cuda:0` alone"
        raise OptionError(f"`{device}` is not here: {count} CUDA devices are", hint=f"the last one is {last}")


def _release(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def cpp_compiler(named: str) -> str:
    """Name the C++ compiler that builds kernels here: `named` (CXX), or the usual one; empty if there is none.

    Its file's name and digest stand for its release, so that a warm start runs no program to learn it; a file of
    another name may be a wrapper, and is asked.
    """
    command = named or ("clang++" if platform.system() == "Darwin" else "g++")
    found = shutil.which(command)
    if found is None:
        return ""
    file = Path(found).resolve()
    if re.search(r"g\+\+|gcc|clang", file.name):
        return f"{file.name} {digest_bytes(file.read_bytes())[:16]}"
    done = subprocess.run([found, "--version"], capture_output=True, text=True, errors="replace", check=False)
    return done.stdout.partition("\n")[0].strip() or digest_bytes(file.read_bytes())[:16]
