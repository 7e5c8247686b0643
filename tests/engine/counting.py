"""Models that need no weights: what the engine does with a step shows in what they answer."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.engine.loop import Engine
from piecework.engine.options import EngineOptions
from piecework.engine.sequence import Output, Request, SamplingParameters
from piecework.engine.served import Served
from piecework.models.folder import KvSite
from piecework.ops import current_step

VOCABULARY = 64
SITE = "layers.0"


class Adding:
    """The next token is the sum of all tokens of the sequence so far, modulo 61, read back out of its pages.

    A page that another sequence wrote to, or that was given away too soon, gives another sum.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        step = current_step("test", SITE)
        cache = step.cache("test", SITE)
        self.steps.append((step.num_tokens, len(step.sequence_lengths)))
        slots = step.slots[: step.num_tokens].long()
        cache.key_rows[slots, 0, 0] = input_ids[0, : step.num_tokens].float()
        logits = torch.zeros(1, len(rows), VOCABULARY)
        for index, row in enumerate(rows.tolist()):
            owner = int(torch.searchsorted(step.query_starts, row, right=True)) - 1
            owner = min(owner, len(step.sequence_lengths) - 1)
            length = int(position_ids[0, row]) + 1
            size = cache.page_size
            pages = step.page_table[owner].tolist()
            places = torch.tensor([pages[at // size] * size + at % size for at in range(length)])
            total = int(cache.key_rows[places, 0, 0].sum())
            logits[0, index, 3 + total % 61] = 5.0
        return logits


def served(step: object = None, **more: object) -> Served:
    """Make what an engine is made of from a step function."""
    return Served(
        step=step or Adding(),  # type: ignore[arg-type]
        sites=(KvSite(SITE, 1, 1),),
        dtype=torch.float32,
        vocabulary_size=VOCABULARY,
        **more,  # type: ignore[arg-type]
    )


def small_engine(step: object = None, **options: object) -> Engine:
    """Make an engine of few pages and short steps."""
    given = {"max_num_sequences": 4, "max_num_batched_tokens": 8, "page_size": 4, "num_pages": 16} | options
    return Engine(served(step), EngineOptions(**given))  # type: ignore[arg-type]


def expected(prompt: list[int], count: int) -> list[int]:
    """Continue a prompt as `Adding` does."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(3 + sum(ids) % 61)
    return ids[len(prompt) :]


def request(name: str, prompt: list[int], **parameters: object) -> Request:
    """Ask for a continuation."""
    return Request(name, tuple(prompt), SamplingParameters(**parameters))  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[tuple[str, int], list[Output]]:
    """Step until nothing is left; return the outputs of each answer."""
    found: dict[tuple[str, int], list[Output]] = {}
    for _ in range(10_000):
        if not engine.has_work:
            return found
        for output in engine.step():
            found.setdefault((output.request_id, output.index), []).append(output)
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: list[Output]) -> list[int]:
    """Return all tokens of an answer."""
    return [token for output in outputs for token in output.token_ids]
