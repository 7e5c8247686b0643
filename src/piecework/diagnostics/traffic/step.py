"""The traffic of a model folder's step, and of an operator, ready to be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecework.diagnostics.explain import find_or_plan
from piecework.diagnostics.traffic.model import Traffic, count_traffic
from piecework.diagnostics.traffic.operators import OperatorCall, operator_program, reference_of
from piecework.errors import OptionError
from piecework.events import Observer
from piecework.models.folder import MIN_ROWS
from piecework.options import CompileOptions
from piecework.seam.toolchain import refuse_absent
from piecework.stages.find import with_siblings
from piecework.store.protocol import SharedStore
from piecework.values.record import Record
from piecework.values.shapes import parse_range


@dataclass(frozen=True)
class StepSizes:
    """A step: its tokens, the sequences that they belong to, and how many tokens each sequence has by then."""

    tokens: int
    sequences: int
    context: int

    def __post_init__(self) -> None:
        if not 1 <= self.sequences <= self.tokens:
            raise OptionError(
                f"`{self.tokens}` tokens of `{self.sequences}` sequences are no step",
                hint="a step has at least one token, and each of its sequences brings one or more",
            )
        if self.context < -(-self.tokens // self.sequences):
            raise OptionError(
                f"a context of `{self.context}` is shorter than the step's own tokens",
                hint="`--context` counts the tokens of a sequence after the step, this step's included",
            )


def step_sizes(tokens: int, sequences: int | None = None, context: int | None = None) -> StepSizes:
    """Fill in what is not given: one sequence a token, and nothing before this step."""
    count = tokens if sequences is None else sequences
    return StepSizes(tokens, count, -(-tokens // max(1, count)) if context is None else context)


def operator_traffic(name: str, call: OperatorCall, tokens: int, sites: int = 1) -> Traffic:
    """Count what an operator moves at so many places."""
    step_sizes(tokens)
    if sites < 1:
        raise OptionError(f"`{sites}` is no number of sites", hint="give a whole number from 1 up")
    refuse_absent(call.device)
    record, texts = operator_program(name, call)
    sizes = {"tokens": tokens}
    as_one = "" if reference_of(f"piecework::{name}") else name  # a function's graph does not say what it is
    counted = count_traffic(record, texts, sizes, reference_of, as_one=as_one)
    return Traffic(sizes, tuple(replace(one, name=name, sites=one.sites * sites) for one in counted))


def model_traffic(
    model: str,
    step: StepSizes,
    *,
    dtype: str,
    device: str,
    options: CompileOptions,
    store: SharedStore,
    observer: Observer,
    offline: bool,
) -> Traffic:
    """Count what a step of a model folder moves; its record is found, or traced and cut, and nothing is compiled."""
    _, record, where = find_or_plan(
        model, dtype=dtype, device=device, options=options, store=store, observer=observer, offline=offline
    )
    return record_traffic(record, where, step)


def record_traffic(record: Record, where: SharedStore, step: StepSizes) -> Traffic:
    """Count what a step of a recorded program moves."""
    chosen = _serving(with_siblings(record, where), step.tokens)
    texts = [where.read_blob(piece.text).decode() for piece in chosen.pieces]
    sizes = _sizes(chosen, step)
    read, written = kv_bytes(chosen.notes, step)
    return Traffic(sizes, count_traffic(chosen, texts, sizes, reference_of), read, written)


def _serving(records: Sequence[Record], tokens: int) -> Record:
    for record in records:
        if not record.symbols:
            return record
        cuts = [parse_range(text) for text in record.ranges[record.symbols[0]["name"]]]
        if any(tokens in cut for cut in cuts):
            return record
    raise OptionError(
        f"no range of the program serves `{tokens}` tokens", hint="raise `--max-num-batched-tokens`, or ask for fewer"
    )


def _sizes(record: Record, step: StepSizes) -> dict[str, int]:
    known = {"tokens": step.tokens, "rows": max(MIN_ROWS, step.sequences)}
    names = [symbol["name"] for symbol in record.symbols]
    return {name: known.get(name, step.tokens if index == 0 else 1) for index, name in enumerate(names)}


def kv_bytes(notes: Mapping[str, Any], step: StepSizes) -> tuple[int, int]:
    """Return the bytes of keys and values that a step reads and writes: a window is read as far as it reaches."""
    read = written = 0
    for site in notes.get("sites", ()):
        row = 2 * site["num_kv_heads"] * site["head_dim"] * getattr(torch, notes["dtype"]).itemsize
        window = site.get("sliding_window") or step.context
        read += step.sequences * min(step.context, window) * row
        written += step.tokens * row
    return read, written

