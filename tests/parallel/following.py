"""What ranks do in tests of following: an engine over a model whose answers are wrong where any rank's step is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import piecework as pw
from engine.counting import Adding, drain, request, served, tokens
from parallel.programs import options
from piecework.api.led import lead_engine, make_follower, part_of
from piecework.api.opening import Opening, Stepping
from piecework.api.serving import serving_options, unheard
from piecework.api.together import join_ranks
from piecework.engine.batch import empty_step
from piecework.engine.follow import Follower
from piecework.engine.lead import Lead
from piecework.engine.loop import Engine
from piecework.engine.options import EngineOptions
from piecework.engine.sequence import SamplingParameters
from piecework.engine.tiers import COMPILED
from piecework.events import ignore
from piecework.models.folder import open_folder
from piecework.ops import AttentionBackend
from piecework.runtime.program import Program

SMALL = EngineOptions(max_num_sequences=4, max_num_batched_tokens=8, page_size=4, num_pages=16)
CAPTURING = EngineOptions(max_num_sequences=4, max_num_batched_tokens=16, page_size=4, num_pages=64)
PROMPTS = [[3], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [5, 6], [4] * 7, [9, 3]]


class Summed(Adding):
    """Each rank adds its part of the likeliest token's lead: where one rank's pages hold other numbers, none leads."""

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        logits = super().__call__(input_ids, position_ids, rows)
        dist.all_reduce(logits, op=dist.ReduceOp.PRODUCT)
        return logits


class Failing(Summed):
    """Fails on some ranks in the third step: before the sum, so that the others wait for it, or after."""

    def __init__(self, ranks: tuple[int, ...], *, before: bool) -> None:
        super().__init__()
        self.is_failing, self.before = dist.get_rank() in ranks, before

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        fails = self.is_failing and len(self.steps) == 2
        if fails and self.before:
            raise ValueError("a kernel is wrong")
        logits = super().__call__(input_ids, position_ids, rows)
        if fails:
            raise ValueError("a kernel is wrong")
        return logits


def ask_all(engine: Engine) -> list[list[int]]:
    """Answer all prompts together, one of them given up on the way."""
    for number, prompt in enumerate(PROMPTS):
        engine.submit(request(str(number), prompt, max_tokens=12, ignore_eos=True))
    engine.submit(request("left", [11, 12], max_tokens=40, ignore_eos=True))
    early = [output for _ in range(3) for output in engine.step()]
    engine.abort("left")
    found = drain(engine)
    return [
        tokens([*(one for one in early if one.request_id == name), *found[name, 0]])
        for name in map(str, range(len(PROMPTS)))
    ]


def answer(ranks: int) -> Any:
    """Answer over the toy, led by rank 0; return the answers there, and the number of steps on the others."""
    joined = join_ranks(ranks, "cpu")
    part = part_of(served(Summed()), SMALL, joined)
    if isinstance(part, Follower):
        part.follow()
        return part.num_steps
    found = ask_all(part)
    steps = part.status.num_steps
    part.close()
    return found, steps


def fail(ranks: tuple[int, ...], before: bool) -> Any:
    """Answer while a better tier fails on some ranks."""
    joined = join_ranks(2, "cpu")
    better = Failing(ranks, before=before)
    part = part_of(served(Summed()), SMALL, joined)
    if isinstance(part, Follower):
        part._functions[9] = better
        part.follow()
        return part.num_steps
    assert isinstance(part.others, Lead)
    part.tiers.swap_in(COMPILED, part.others.step(9, better))
    try:
        found = ask_all(part)
    except Exception as error:
        part.fail(error)
        raise
    part.close()
    return found, part.status.trouble, part.status.steps_by_tier


def generate(folder: Path, store: Path, parameters: list[SamplingParameters]) -> Any:
    """Ask `pw.LLM` for sampled answers on this rank, twice, then for what cannot be answered."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    llm = pw.LLM(folder, options=options(ranks, "eager"), store=pw.DiskStore(store))
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12]]
    found = [[asdict(one) for one in llm.generate(prompts, parameters)] for _ in range(2)]
    told = ""
    try:
        llm.generate([list(range(3, 90)) * 4], parameters[0])
    except pw.errors.OptionError as error:
        told = error.message
    again = [one.token_ids for one in llm.generate(prompts, max_tokens=4, ignore_eos=True)]
    return found, told, again, torch.get_num_threads()


class DryOpening(Opening):
    """Captures on a CPU, by the device that records what a GPU would; keeps what was captured."""

    def __init__(self, folder: Path, engine: EngineOptions, *, idle_sizes: tuple[int, ...] = (2, 4)) -> None:
        asked = pw.CompileOptions(compiler="eager", tensor_parallel_size=2)
        settings = serving_options(asked, engine)
        super().__init__(open_folder(folder), "auto", "cpu", settings, engine, ignore, unheard)
        self.idle_sizes = idle_sizes
        self.made: list[pw.CapturedProgram] = []

    def capture_of(
        self, stepping: Stepping, backend: AttentionBackend, lead: Lead | None = None
    ) -> Callable[[Program], Any]:
        def captured(program: Program) -> Any:
            made = pw.capture(
                program,
                device="dry",
                options=pw.CaptureOptions(decode="piecewise", decode_sizes=self.idle_sizes, when="idle"),
                steps=lambda phase, size: empty_step(stepping.caches, size, "cpu"),
                phase_of=lambda: stepping.phase,
            )
            self.made.append(made)
            return made if lead is None else lead.capturing(made, program)

        return captured


def capture(folder: Path, store: Path) -> Any:
    """Answer while sizes are captured on both ranks, and once all are; return answers and what replayed what."""
    joined = join_ranks(2, "cpu")
    opening = DryOpening(folder, CAPTURING)
    kept = pw.DiskStore(store)
    if joined.rank:
        make_follower(opening, kept, joined).follow()
    else:
        engine = lead_engine(opening, kept, joined, lambda: None)
        before = ask_all(engine)
        while engine.has_background_work:
            engine.idle()
        after, status = ask_all(engine), engine.status
        engine.close()
    (made,) = opening.made
    replayed = sorted(made.sizes), dict(made.counts)
    return replayed if joined.rank else (before, after, status.tier, status.trouble, replayed)
