"""An engine loop of one's own over a Hugging Face model: many requests at a time, in one flat batch a step.

    python examples/engine_loop.py MODEL_FOLDER 5,6,7 8,9 10,11,12,13

Each argument after the folder is a prompt of token ids. A request runs its prompt in its first step and one token in
each later one; all tokens of a step lie one after another, and a `Step` says which are whose and where their keys go.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field

import torch

import piecework as pw
from piecework.engine.generate import allocate_caches
from piecework.ops.step import Step, step_context

PAGE, PAGES, MOST_TOKENS = 16, 64, 8


@dataclass
class Running:
    """One request: all its tokens, how many of them are computed, and the pages that hold their keys."""

    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) - self.num_prompt >= MOST_TOKENS


def run_step(model, caches, batch: list[Running]) -> list[int]:  # type: ignore[no-untyped-def]
    """Compute every token of the batch that is not computed yet, and choose each request's next one."""
    ids, positions, slots, starts = [], [], [], [0]
    for request in batch:
        for position in range(request.num_computed, len(request.tokens)):
            ids.append(request.tokens[position])
            positions.append(position)
            slots.append(request.pages[position // PAGE] * PAGE + position % PAGE)
        starts.append(len(ids))
    widest = max(len(request.pages) for request in batch)
    step = Step.from_lists(
        slots=slots, query_starts=starts, sequence_lengths=[len(request.tokens) for request in batch],
        page_table=[[*request.pages, *[0] * (widest - len(request.pages))] for request in batch], sites=caches,
    )  # fmt: skip
    last = [end - 1 for end in starts[1:]]
    rows = torch.tensor(last if len(last) > 1 else last * 2)  # compiled code serves two rows and more
    with torch.inference_mode(), step_context(step):
        logits = model.step(torch.tensor([ids]), torch.tensor([positions]), rows)
    return logits.reshape(-1, logits.shape[-1]).argmax(-1)[: len(batch)].tolist()  # type: ignore[no-any-return]


def serve(model, prompts: list[list[int]]) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """Answer the prompts; a new one joins the batch at each step, and a page is taken when a request needs one."""
    caches = allocate_caches(model.sites, num_pages=PAGES, page_size=PAGE, dtype=model.dtype)
    free, waiting = list(range(PAGES)), [Running(prompt, len(prompt)) for prompt in prompts]
    every, batch = list(waiting), waiting[:0]
    for number in itertools.count():
        batch = [request for request in (*batch, *waiting[:1]) if not request.is_done]
        del waiting[:1]
        if not batch:
            break
        for request in batch:
            while len(request.pages) * PAGE < len(request.tokens):
                request.pages.append(free.pop())
        print(f"step {number}: {sum(len(r.tokens) - r.num_computed for r in batch)} tokens of {len(batch)} requests")
        for request, token in zip(batch, run_step(model, caches, batch), strict=True):
            request.num_computed = len(request.tokens)
            request.tokens.append(token)
            if request.is_done:
                free += request.pages
    return [request.tokens[request.num_prompt :] for request in every]


def main() -> None:
    """Open the model's program, and answer."""
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64)
    model = pw.LLM(sys.argv[1], options=options, store=pw.MemoryStore()).model
    prompts = [[int(token) for token in prompt.split(",")] for prompt in sys.argv[2:]]
    for prompt, answer in zip(sys.argv[2:], serve(model, prompts), strict=True):
        print(f"{prompt}: {','.join(map(str, answer))}")


if __name__ == "__main__":
    main()
