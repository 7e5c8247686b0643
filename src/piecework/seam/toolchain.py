"""What turns a graph into code here: releases, architecture and instruction set, as named factors."""

from __future__ import annotations

import platform
import sys

import torch

from piecework.errors import OptionError
from piecework.seam.probe import processor_flags
from piecework.values.digest import digest_text


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
        if not torch.cuda.is_available():
            raise OptionError("torch finds no CUDA device here", hint="use `cpu`: `--device cpu`")
        major, minor = torch.cuda.get_device_capability(torch.device(device))
        return factors | {"arch": f"sm_{major}{minor}", "cuda": str(torch.version.cuda), "triton": _release("triton")}
    # Kernels are built for this very processor, so all the instructions that it knows stand in the key.
    flags = digest_text(" ".join(sorted(processor_flags())))[:16]
    arch = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"
    return factors | {"arch": arch, "os": platform.system()}


def _release(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
