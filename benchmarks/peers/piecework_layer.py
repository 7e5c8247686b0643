"""Start Piecework on the toy: cold through `compile`, warm through `load`, which sees no model object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import piecework as pw
from measure import Elapsed
from peers.work import Started, Work
from toy_llama import OPERATOR, attention_body

pw.split_op(OPERATOR)(attention_body)
DYNAMIC = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}


@contextlib.contextmanager
def one_range(work: Work) -> Iterator[Started]:
    """Compile one artifact a piece, for 2 to 8,192 tokens, which is what the other systems compile."""
    yield _start(work, pw.CompileOptions(ranges=((2, 8192),)))


@contextlib.contextmanager
def default_options(work: Work) -> Iterator[Started]:
    """Compile what the defaults say: two ranges, and size 1 by itself."""
    yield _start(work, pw.CompileOptions())


def _start(work: Work, options: Any) -> Started:
    model, inputs = work.model(), work.inputs()
    weights = model.state_dict()
    key_file = work.folder / "program_key"
    begin = pw.load if work.is_warm else pw.compile  # resolved here: imports are not what is timed
    open_store = pw.DiskStore
    start = Elapsed.now()
    store = open_store(work.folder / "store")
    if work.is_warm:
        program = begin(store, key=key_file.read_text(), weights=weights)
    else:
        example = dict(zip(("input_ids", "positions"), inputs, strict=True))
        program = begin(model, example, dynamic=DYNAMIC, options=options, store=store)
    bound = start.until_now()
    program(*inputs)
    first_result = start.until_now()
    if not work.is_warm:
        key_file.write_text(str(program.key))
    return Started(program, first_result, bound)
