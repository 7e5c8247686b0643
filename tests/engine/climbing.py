"""A tiny model, what it answers, and the loads that a climb is watched under."""

from __future__ import annotations

import time

import piecework as pw
from engine.counting import drain, request, tokens
from piecework.engine.loop import Engine
from piecework.engine.options import EngineOptions

OPTIONS = pw.CompileOptions(compiler="eager")
SMALL = EngineOptions(max_num_sequences=3, max_num_batched_tokens=16, page_size=4, num_pages=64, compile_nice=0)
PROMPTS = [[5, 6, 7, 8 + n] for n in range(6)]


def serve(engine: Engine, answers: list[list[int]], name: str = "") -> None:
    """Serve every prompt together, and hold the answers to those of eager alone."""
    for number, prompt in enumerate(PROMPTS):
        engine.submit(request(f"{name}{number}", prompt, max_tokens=5, ignore_eos=True))
    found = drain(engine)
    assert [tokens(found[f"{name}{number}", 0]) for number in range(len(PROMPTS))] == answers


def serve_until_climbed(engine: Engine, answers: list[list[int]]) -> None:
    """Serve until the engine has no more work beside, and once more then."""
    round_number = 0
    while engine.has_background_work:
        serve(engine, answers, f"{round_number}-")
        round_number += 1
        time.sleep(0.3)
    serve(engine, answers, "last-")
    assert engine.pool.num_held == 0
