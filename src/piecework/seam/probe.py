"""What this machine and toolchain are, as far as an artifact depends on it; imports no compiler."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# The flags of the processor that a compiler may use by `-march=native`; others tell of the kernel or hypervisor.
_X86_FLAGS = re.compile(
    r"sse\w*|ssse3|avx\w*|fma4?|f16c|bmi[12]|movbe|popcnt|aes|pclmulqdq|vaes|vpclmulqdq|gfni|sha_ni|adx|rd\w+|abm|"
    r"amx_\w+|cx16|lahf_lm|xsave\w*|clwb|clflushopt|fsgsbase|movdir\w+|serialize|prefetchw?|3dnowprefetch|enqcmd|waitpkg"
)


@functools.cache
def processor_flags() -> frozenset[str]:
    """Return the instruction-set flags of this processor (Linux); empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    found = match.group(1).split() if match else []
    if platform.machine() in ("x86_64", "AMD64"):
        found = [flag for flag in found if _X86_FLAGS.fullmatch(flag)]
    return frozenset(found)


def cpu_facts() -> dict[str, Any]:
    """Return what CPU kernels depend on: architecture, instruction sets, the vector width torch uses."""
    return {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flags": " ".join(sorted(processor_flags())),
    }


def cuda_facts(device: int = 0) -> dict[str, Any]:
    """Return what CUDA kernels depend on: architecture of the device, CUDA version of torch; needs the device."""
    major, minor = torch.cuda.get_device_capability(device)
    return {"architecture": f"sm_{major}{minor}", "cuda": torch.version.cuda or torch.version.hip or ""}


def machine_facts(device: str) -> dict[str, Any]:
    """Return the facts of the machine that enter the key of an artifact for `device` (`cpu` or `cuda`)."""
    python = ".".join(platform.python_version_tuple()[:2])  # kernels are extension modules of one minor release
    facts: dict[str, Any] = {"torch": torch.__version__, "python": python}
    return facts | (cuda_facts() if device == "cuda" else cpu_facts())


def missing_for(facts: Mapping[str, Any]) -> str:
    """Say what an artifact built on a machine with `facts` lacks on this one; empty if it can run here.

    A processor with more instruction sets than the artifact was built for runs it; one with fewer would crash in it.
    """
    here = machine_facts("cuda" if "architecture" in facts else "cpu")
    for name in ("torch", "python", "machine", "architecture", "cuda"):
        if name in facts and facts[name] != here.get(name):
            return f"{name} `{facts[name]}` (here `{here.get(name)}`)"
    lacking = set(str(facts.get("flags", "")).split()) - set(str(here.get("flags", "")).split())
    return f"processor features `{' '.join(sorted(lacking))}`" if lacking else ""
