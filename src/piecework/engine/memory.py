"""How many pages there is memory for: what is left after everything else that will want some.

The sum is made of the configuration and the weights alone, so that a cold and a warm start come to the same number. On
a GPU the largest step is run once before, with compiling forbidden: what it takes counts where it is more, rounded up
so that eager code and its text come to the same. On a CPU such a step would cost seconds of the start: there the sum
alone counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from piecework.engine.batch import make_batch
from piecework.engine.generate import allocate_caches
from piecework.engine.options import EngineOptions
from piecework.engine.sampler import choose
from piecework.engine.scheduler import Scheduled
from piecework.engine.sequence import Request, Sequence
from piecework.engine.served import Served, call_step
from piecework.errors import EngineError
from piecework.ops.triton_launch import WANTED_PROGRAMS
from piecework.seam.cuda import CudaDevice
from piecework.seam.forbid import forbid_compilation

GPU_SHARE, RAM_SHARE = 0.9, 0.4
RAM_BYTES = 2 << 30
"""Without a share asked for, pages in RAM take no more: they are written to at the start, and others live there too."""
COMPILE_BYTES = 1 << 30
"""What a compile beside the server may take, in RAM; the trace of it holds no weights."""
CAPTURE_STEPS = 2.0
"""The pool of captured graphs in multiples of a largest decode step: sizes share it, and each keeps its results."""
ROUNDED_BYTES = 128 << 20
REHEARSED_ROWS, REHEARSED_LENGTH = 4, 600
"""Rows and length of small steps that go before: attention has kernels for one row and several, short and long."""
_ROOT = Path("/sys/fs/cgroup")


class Meter(Protocol):
    """A device that tells the most memory that a block took at a time."""

    def measure_peak(self) -> AbstractContextManager[Callable[[], int]]: ...


def page_bytes(served: Served, page_size: int) -> int:
    """Return the bytes of one page, of all sites together."""
    per_token = sum(2 * site.num_kv_heads * site.head_dim for site in served.sites)
    return per_token * page_size * served.dtype.itemsize


def step_bytes(served: Served, num_tokens: int, num_rows: int) -> int:
    """Return what a step's values take at its widest place: a layer's, or the logits with what is made of them."""
    config = served.config
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 1024)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    inner *= max(1, int(config.get("num_experts_per_tok") or 1))  # each token goes through so many
    layer = num_tokens * (8 * hidden + 3 * inner) * max(served.dtype.itemsize, 2)
    # Some models cannot choose rows. Logits in float32; in float64 their probabilities, sorted with their places, and
    # running sums.
    rows = num_rows if served.keeps_rows else num_tokens
    return layer + rows * served.vocabulary_size * served.dtype.itemsize + num_rows * served.vocabulary_size * 48


def meter_of(device: str) -> Meter | None:
    """Return what measures the profile run on a device; None where none is made."""
    return CudaDevice(torch.device(device).index) if torch.device(device).type == "cuda" else None


def profile_step(served: Served, options: EngineOptions, meter: Meter) -> int:
    """Run the largest step once, on pages of its own, and choose its tokens; return the bytes that it took.

    Small steps come first, in which kernels of our own are compiled where no cache has them: of one sequence, and of so
    many that their keys are not split. Raises CompileForbidden where the largest step still compiles anything: it would
    again while requests wait.
    """
    longest = min(limit for limit in (options.max_length, served.max_positions, REHEARSED_LENGTH) if limit)
    for num_rows in (1, REHEARSED_ROWS):
        for length in (num_rows, longest):
            _prepare(served, options, [(length, min(length, num_rows))])()
    few_heads = min((site.num_kv_heads for site in served.sites), default=1)
    many = min(-(-WANTED_PROGRAMS // few_heads), options.max_num_batched_tokens - 1)
    for last in (1, 2):
        _prepare(served, options, [(1, 1)] * (many - 1) + [(last, last)])()
    count = options.max_num_sequences
    each, more = divmod(options.max_num_batched_tokens, count)
    lengths = [each + (index < more) for index in range(count)]
    run = _prepare(served, options, [(length, length) for length in lengths])
    with forbid_compilation(), meter.measure_peak() as peak:
        run()
        return peak()


def _prepare(served: Served, options: EngineOptions, lengths: list[tuple[int, int]]) -> Callable[[], object]:
    """Return what runs a step of sequences, each of a length that ends in some rows, and chooses their tokens.

    Their pages are their own, and there before the run.
    """
    needed = [-(-length // options.page_size) for length, _ in lengths]
    caches = allocate_caches(
        served.sites,
        num_pages=sum(needed), page_size=options.page_size, dtype=served.dtype, device=served.device,
    )  # fmt: skip
    scheduled, first = [], 0
    for index, ((length, num_rows), pages) in enumerate(zip(lengths, needed, strict=True)):
        sequence = Sequence(Request(f"profile-{index}", (0,) * length), 0, index, 0)
        sequence.pages = array("i", range(first, first + pages))
        first += pages
        scheduled.append(Scheduled(sequence, length - num_rows, num_rows))
    batch = make_batch(scheduled, caches, options.page_size, served.device, served.backend)
    sequences = [one.sequence for one in scheduled]
    return lambda: choose(call_step(served.step, batch), sequences, served.end_of_sequence)


def longest_sequence(served: Served, options: EngineOptions, num_pages: int) -> int:
    """Return how long a prompt may be with its answer: what the model, the options and the pages allow."""
    limits = (options.max_length, served.max_positions, num_pages * options.page_size)
    return min(limit for limit in limits if limit)


def choose_pages(served: Served, options: EngineOptions, *, ranks: int = 1) -> int:
    """Return the pages that the device has memory for, measured by a profile run where one is made.

    Ranks on a CPU share its memory. Each of them calls this, since the profile run's steps are of all ranks.
    """
    meter = meter_of(served.device)
    profiled = profile_step(served, options, meter) if meter is not None else 0
    total = device_bytes(served.device) // (ranks if meter is None else 1)
    return plan_pages(served, options, total_bytes=total, profiled_bytes=profiled)


def plan_pages(served: Served, options: EngineOptions, *, total_bytes: int = 0, profiled_bytes: int = 0) -> int:
    """Return the number of pages for an engine. Raises EngineError where not even one prompt would fit."""
    is_gpu = torch.device(served.device).type == "cuda"
    total = total_bytes or device_bytes(served.device)
    share = options.memory_fraction or (GPU_SHARE if is_gpu else RAM_SHARE)
    step = max(
        step_bytes(served, options.max_num_batched_tokens, options.max_num_sequences),
        -(-profiled_bytes // ROUNDED_BYTES) * ROUNDED_BYTES,
    )
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
