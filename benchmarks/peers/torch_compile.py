"""Start `torch.compile` on the toy, in the ways its users choose between, and eager beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from measure import Elapsed
from peers.work import Started, Work, first_result


@contextlib.contextmanager
def marked(work: Work) -> Iterator[Started]:
    """Compile the whole model with the token dimension alone marked dynamic, as serving stacks do."""
    compiled = torch.compile(work.model(), fullgraph=True, dynamic=False)
    input_ids, positions = work.inputs()
    torch._dynamo.mark_dynamic(input_ids, 0)
    torch._dynamo.mark_dynamic(positions, 0)
    start = Elapsed.now()
    compiled(input_ids, positions)
    yield Started(compiled, start.until_now())


@contextlib.contextmanager
def dynamic(work: Work) -> Iterator[Started]:
    """Compile the whole model with every dimension dynamic."""
    yield first_result(torch.compile(work.model(), fullgraph=True, dynamic=True), work)


@contextlib.contextmanager
def layers(work: Work) -> Iterator[Started]:
    """Compile each layer by itself, which compiles like layers once ("regional compilation")."""
    model = work.model()
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=True)
    yield first_result(model, work)


@contextlib.contextmanager
def eager(work: Work) -> Iterator[Started]:
    """Compile nothing."""
    yield first_result(work.model(), work)
