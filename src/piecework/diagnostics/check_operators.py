"""Whether a model's operators keep their contracts: they run in a real step, on real inputs, at several sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from piecework.api.folder import OpenModel, open_model
from piecework.diagnostics.findings import ABSENT, FAILS, WORKS, Finding
from piecework.engine.generate import allocate_caches, run_step
from piecework.errors import PieceworkError
from piecework.options import NONE, CompileOptions
from piecework.seam.watch import ContractWatch

SIZES = (1, 2, 7, 8, 13, 16)
"""One, two, and such that are multiples of eight and such that are not: what an operator may round up to."""


def check_operators(model: str, *, dtype: str, device: str, offline: bool) -> Iterator[Finding]:
    """Run a folder's model uncompiled at a few sizes; yield a finding for each operator that is not torch's own."""
    try:
        opened = open_model(model, dtype=dtype, device=device, options=CompileOptions(mode=NONE), offline=offline)
        watch = watch_steps(opened)
    except PieceworkError as error:
        yield Finding("contracts", FAILS, error.message, error.hint)
        return
    if not watch.shapes:
        yield Finding("contracts", ABSENT, "the model calls no operator but torch's own")
    for name, shapes in sorted(watch.shapes.items()):
        faults = watch.faults.get(name, [])
        for fault in faults:
            yield Finding("contracts", FAILS, fault.message, fault.hint)
        if not faults:
            yield Finding("contracts", WORKS, f"`{name}` keeps its own at {len(shapes)} shapes of its arguments")


def watch_steps(opened: OpenModel) -> ContractWatch:
    """Run a prefill of each size and a decode step after it, with every operator watched."""
    words = int(opened.folder.config.get("vocab_size", 2))
    most = opened.folder.max_positions or max(SIZES) + 1
    watch = ContractWatch()
    for size in (size for size in SIZES if size < most):
        caches = allocate_caches(
            opened.sites, num_pages=1, page_size=size + 1, dtype=opened.dtype, device=opened.device
        )
        ids = torch.arange(1, size + 2).remainder(words).tolist()
        with watch:
            run_step(opened.step, ids[:size], 0, caches, opened.device)
            run_step(opened.step, ids[size:], size, caches, opened.device)
    return watch
