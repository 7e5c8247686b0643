"""Run one step of a rank's program in this process, with nobody on the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import piecework.ops
from piecework.api.programs import read_weights
from piecework.engine.generate import allocate_caches, run_step
from piecework.events import ignore
from piecework.models.folder import site_from
from piecework.pipeline import bind_record
from piecework.values.placement import Placement


def run_step_alone(record: Any, store: Any, folder: Path, rows: int, rank: int = 0) -> torch.Tensor:
    """Bind a record as one of two ranks and run a step of so many tokens."""
    weights = read_weights(record, folder, placement=Placement(rank, 2))
    program = bind_record("alone", record, weights, piecework.ops.BODIES, store, ignore)
    sites = [site_from(site) for site in record.notes["sites"]]
    caches = allocate_caches(sites, num_pages=1, page_size=rows, dtype=torch.float32)

    def step(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> Any:
        return program(input_ids=ids, position_ids=positions, logits_to_keep=wanted)

    return run_step(step, list(range(3, 3 + rows)), 0, caches)
