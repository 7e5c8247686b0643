"""Bisect a model folder: one step over the prompt, one of a single token, and then token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import piecework.ops
from piecework.api.folder import OpenModel, open_model
from piecework.api.live import refuse_direct
from piecework.api.llm import LLM
from piecework.api.stores import default_store, report_to_log
from piecework.diagnostics.bisect import Finding, Search
from piecework.diagnostics.tokens import TokenStep, compare_tokens, token_table
from piecework.engine.generate import allocate_caches, run_step
from piecework.engine.requests import chosen
from piecework.errors import OptionError
from piecework.events import Observer
from piecework.options import NONE, STOCK, CompileOptions
from piecework.runtime.program import Program
from piecework.store.protocol import KernelStore

Call = Callable[..., Any]


@dataclass(frozen=True)
class FolderFinding:
    """Where the program first differs, on which step (`prompt` or `token`), and the tokens that both give."""

    finding: Finding
    step: str
    tokens: tuple[TokenStep, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return what was found as plain data."""
        found = self.finding
        inside = found.inside
        fault = found.difference
        return {
            "stage": found.stage,
            "step": self.step,
            "region": found.region,
            "piece": found.piece,
            "range": found.box,
            "tensor": found.tensor,
            "fault": fault.fault if fault is not None else "",
            "error": fault.error if fault is not None else 0.0,
            "allowed": fault.allowed if fault is not None else 0.0,
            "ulps": fault.ulps if fault is not None else 0.0,
            "value": inside.value if inside is not None else "",
            "line": inside.line if inside is not None else "",
            "origin": inside.origin if inside is not None else "",
            "folder": str(found.folder) if found.folder is not None else "",
            "skipped": dict(found.skipped),
            **token_table(self.tokens),
        }


def bisect_folder(
    model: str | Path,
    prompt: str | Sequence[int],
    *,
    dtype: str = "auto",
    device: str = "cpu",
    options: CompileOptions | None = None,
    store: KernelStore | None = None,
    observer: Observer | None = None,
    offline: bool = False,
    max_tokens: int = 8,
    folder: Path | None = None,
) -> FolderFinding:
    """Open a model folder as it is and as its program, and find where they first differ on a prompt.

    Raises OptionError for a prompt that one step does not hold, or a mode that has no stages.
    """
    settings = (options or CompileOptions()).resolve()
    if settings.mode in (NONE, STOCK):
        raise OptionError(f"mode `{settings.mode}` has no stages to compare", hint="use mode piecewise or trace_once")
    refuse_direct(settings.keyed(), "what is bisected")
    watch = observer or report_to_log
    kept = store if store is not None else default_store(watch, strict=settings.strict)
    common: dict[str, Any] = {"dtype": dtype, "device": device, "observer": watch, "offline": offline}
    llm = LLM(model, options=settings, store=kept, **common)
    ids = llm.encode(prompt)
    if not 1 <= len(ids) <= settings.max_num_batched_tokens:
        raise OptionError(
            f"the prompt has {len(ids)} tokens; one step takes 1 to {settings.max_num_batched_tokens}",
            hint="give a shorter prompt: bisecting looks at one step",
        )
    eager = open_model(model, options=replace(settings, mode=NONE), **common)
    program = llm.model.program
    assert isinstance(program, Program)
    search = Search(program, kept, chosen(settings, device)[0], piecework.ops.BODIES)
    finding, step = _search(search, eager, llm.model, ids, folder)
    tokens = compare_tokens(
        eager.step, llm.model.step, ids, sites=eager.sites, dtype=eager.dtype, max_tokens=max_tokens,
        eager_error=finding.eager_error, device=device,
    )  # fmt: skip
    return FolderFinding(finding, step, tokens)


def _search(
    search: Search, eager: OpenModel, compiled: OpenModel, ids: Sequence[int], folder: Path | None
) -> tuple[Finding, str]:
    """Compare on a step over the prompt, and where that is equal on one more token: it has artifacts of its own."""
    caches: dict[int, Any] = {}

    def step(call: Call, token_ids: Sequence[int], start: int) -> torch.Tensor:
        if id(call) not in caches:
            caches[id(call)] = allocate_caches(
                eager.sites, num_pages=1, page_size=len(ids) + 1, dtype=eager.dtype, device=eager.device
            )
        one = replace(compiled, program=call)
        return run_step(one.step, token_ids, start, caches[id(call)], eager.device)

    def compare(token_ids: Sequence[int], start: int) -> Finding:
        return search.find(
            lambda: step(eager.program, token_ids, start), lambda call: step(call, token_ids, start), folder
        )

    found = compare(ids, 0)
    if not found.is_equal:
        return found, "prompt"
    return compare([ids[-1]], len(ids)), "token"


def finding_lines(found: FolderFinding) -> list[str]:
    """Lay out what was found for people."""
    data = found.as_dict()
    if found.finding.is_equal:
        lines = ["every stage gives what the model gives, within the tolerance"]
    else:
        where = f" at region {data['region']} (piece {data['piece']}, {data['range']})" if data["piece"] >= 0 else ""
        lines = [f"stage {data['stage']} is the first that differs, on the {data['step']} step{where}: {data['fault']}"]
        if data["value"]:
            lines.append(f"first inside the piece: `{data['value']}` ({data['origin']}): {data['line']}")
        if data["folder"]:
            lines.append(f"`python {data['folder']}/repro.py` shows it alone")
    lines += [f"stage {name} was not compared: {why}" for name, why in data["skipped"].items()]
    greedy, drawn = data["greedy"], data["sampling"]
    lines.append(
        f"logits: largest relative error {data['logits']['largest_error']:.2e} over {len(found.tokens)} tokens"
    )
    lines.append(
        "greedy tokens: equal"
        if greedy["equal"]
        else f"greedy tokens: differ first at token {greedy['first_step']}, where the lead is {greedy['margin']:.3g} "
        f"and {greedy['decisive_margin']:.3g} decides" + (": wrong" if greedy["wrong"] else ": undecided")
    )
    lines.append(
        f"seeded draws: {_equal(drawn['equal_on_equal_logits'])} on equal logits, "
        f"{_equal(drawn['equal_on_own_logits'])} on each side's own"
    )
    return lines


def _equal(value: bool) -> str:
    return "equal" if value else "different"
