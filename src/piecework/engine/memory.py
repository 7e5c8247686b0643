"""How many pages there is memory for: what is left after everything else that will want some.

The sum is made of the configuration and the weights alone, so that a cold and a warm start come to the same number; on
a GPU the memory that a profile run took counts where it was more.
"""

from __future__ import annotations

from pathlib import Path

import torch

from piecework.engine.options import EngineOptions
from piecework.engine.served import Served
from piecework.errors import EngineError

GPU_SHARE, RAM_SHARE = 0.9, 0.4
RAM_BYTES = 2 << 30
"""Without a share asked for, pages in RAM take no more: they are written to at the start, and others live there too."""
COMPILE_BYTES = 1 << 30
"""What a compile beside the server may take, in RAM; the trace of it holds no weights."""
CAPTURE_STEPS = 2.0
"""The pool of captured graphs in multiples of a largest decode step: sizes share it, and each keeps its results."""
_ROOT = Path("/sys/fs/cgroup")


def page_bytes(served: Served, page_size: int) -> int:
    """Return the bytes of one page, of all sites together."""
    per_token = sum(2 * site.num_kv_heads * site.head_dim for site in served.sites)
    return per_token * page_size * served.dtype.itemsize


def step_bytes(served: Served, num_tokens: int, num_rows: int) -> int:
    """Return what a step's values take at its widest place: a layer's, or the logits with what is made of them."""
    config = served.config
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 1024)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    layer = num_tokens * (8 * hidden + 3 * inner) * max(served.dtype.itemsize, 2)
    # Some models cannot choose rows. float32 logits, their probabilities in float64, and a sorted copy.
    rows = num_rows if served.keeps_rows else num_tokens
    return layer + rows * served.vocabulary_size * served.dtype.itemsize + num_rows * served.vocabulary_size * 20


def plan_pages(served: Served, options: EngineOptions, *, total_bytes: int = 0, profiled_bytes: int = 0) -> int:
    """Return the number of pages for an engine. Raises EngineError where not even one prompt would fit."""
    is_gpu = torch.device(served.device).type == "cuda"
    total = total_bytes or device_bytes(served.device)
    share = options.memory_fraction or (GPU_SHARE if is_gpu else RAM_SHARE)
    step = max(step_bytes(served, options.max_num_batched_tokens, options.max_num_sequences), profiled_bytes)
    captured = int(CAPTURE_STEPS * step_bytes(served, options.max_num_sequences, options.max_num_sequences))
    taken = {
        "weights": served.weights_bytes,
        "step": step,
        "capture": captured if is_gpu and not options.enforce_eager else 0,
        "compile": 0 if is_gpu or options.enforce_eager else COMPILE_BYTES,
    }
    left = int(total * share) - sum(taken.values())
    if not is_gpu and not options.memory_fraction:
        left = min(left, RAM_BYTES)
    one = page_bytes(served, options.page_size)
    longest = min(limit for limit in (options.max_length, served.max_positions, 1 << 24) if limit)
    wanted = options.max_num_sequences * -(-longest // options.page_size)
    pages = min(left // one, wanted)
    if pages < 2:
        raise EngineError(
            f"there is no memory for pages: {total * share / 1e9:.2f} GB may be used, and "
            + ", ".join(f"{name} takes {size / 1e9:.2f}" for name, size in taken.items()),
            hint="raise `memory_fraction`, or lower `max_num_batched_tokens` or `max_num_sequences`",
            facts={"total_bytes": total, "share": share, **taken},
        )
    return int(pages)


def device_bytes(device: str) -> int:
    """Return the memory of a device; of RAM, what this process may have of it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(torch.device(device)).total_memory
    limits = [_meminfo("MemTotal")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = _ROOT / name
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limit for limit in limits if limit)


def _meminfo(name: str) -> int:
    file = Path("/proc/meminfo")
    if file.is_file():
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 8 << 30  # where the system does not say
