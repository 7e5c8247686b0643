"""What compiles after the start is caught with the step that caused it, written down, and run by the next start."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from piecework.engine import manifest
from piecework.engine.batch import Batch
from piecework.engine.loop import Engine
from piecework.engine.manifest import Specialisation
from piecework.engine.shapes import Coverage, StepShape, count_class, parse_sweep, shapes_of
from piecework.errors import OptionError
from server.serving import NAME, Running, running

PLANTED = 24  # tokens of a step: from here on the planted function is another one


class Planted:
    """A runner whose steps call a function under torch.compile, as a model's own code may: it compiles when it is met.

    Its guard tells two kinds of steps apart, as a kernel does that is specialised by size.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        torch.compiler.reset()
        self.function: Callable[[Tensor, bool], Tensor] = torch.compile(planted, backend="eager", dynamic=True)

    def run(self, batch: Batch) -> Tensor:
        """Run the batch, and the function on its logits."""
        logits: Tensor = self.runner.run(batch)
        return self.function(logits, batch.num_tokens >= PLANTED)


def planted(logits: Tensor, is_large: bool) -> Tensor:
    return logits * 1 if is_large else logits + 0


def plant(engine: Engine) -> None:
    """Have an engine's steps compile."""
    engine.runner = Planted(engine.runner)


def test_a_planted_miss_is_caught_written_and_gone_at_the_next_start(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "misses.jsonl"
    prompt = [number % 90 for number in range(3, 33)]
    with running(folder, alter=plant, manifest=file) as server:
        client = server.client()
        # The check before ready has compiled the small kind; two small prompts find nothing to compile.
        client.completions.create(model=NAME, prompt=[5, 6, 7], max_tokens=3)
        assert server.misses == [] and not file.exists()
        client.completions.create(model=NAME, prompt=prompt, max_tokens=3)
        assert {(each.kind, each.shape) for each in server.misses} == {("Dynamo", StepShape("prefill", 30, 1, 30))}
        assert server.misses[0].what.startswith("planted at test_misses.py:")
    (line,) = {json.dumps(json.loads(line)["shape"]) for line in file.read_text().splitlines()}
    assert json.loads(line) == {"phase": "prefill", "num_tokens": 30, "num_sequences": 1, "longest": 30}

    shapes = manifest.shapes_in(manifest.read(file))
    with running(folder, alter=plant, shapes=shapes, manifest=file) as server:
        server.client().completions.create(model=NAME, prompt=prompt, max_tokens=3)
        assert server.misses == []
        assert server.front.coverage.ratio == 1.0 or "prefill 17-32" not in str(server.front.coverage.uncovered)


def test_four_tokens_leave_the_cover_below_one_and_the_rest_is_named(folder: Path) -> None:
    with running(folder, shapes=tuple(shapes_of(4))) as server:
        client = server.client()
        client.completions.create(model=NAME, prompt=[5, 6, 7, 8], max_tokens=1)
        assert (server.front.coverage.ratio, dict(server.front.coverage.uncovered)) == (1.0, {})
        client.completions.create(model=NAME, prompt=list(range(3, 43)), max_tokens=1)
        client.completions.create(model=NAME, prompt=list(range(50, 82)), max_tokens=1)
        coverage = server.front.coverage
        assert (coverage.num_covered, coverage.num_met, round(coverage.ratio, 3)) == (1, 3, 0.333)
        assert {kind: shape.num_tokens for kind, shape in coverage.uncovered.items()} == {
            "prefill 33-64 tokens, 1 sequences": 40,
            "prefill 17-32 (of 16) tokens, 1 sequences": 32,
        }
        scraped = server.ask("GET", "/metrics")[2].splitlines()
        assert "piecework_startup_coverage 0.3333333333333333" in scraped
        assert 'piecework_shapes{state="uncovered"} 2.0' in scraped


def test_stated_shapes_come_out_as_they_are(folder: Path) -> None:
    """Those of a sweep, and those that a manifest may hold."""
    sweep = parse_sweep("sizes=1,8-9,64")
    shapes = (*sweep, StepShape("decode", 3, 3, 100), StepShape("prefill", 40, 5, 8), StepShape("decode", 16, 16, 2))
    with running(folder, shapes=shapes) as server:
        assert server.runner is not None and server.engine is not None
        ran = {(each.phase, each.num_tokens, each.num_sequences) for each in shapes if each.num_sequences <= 16}
        assert len(ran) == 9
        assert ran <= server.runner.seen
        # The largest batch of the sweep has no room: that is logged, and the server starts.
        assert ("decode", 64, 64) not in server.runner.seen
        assert server.engine.pool.num_held == 0


@pytest.mark.slow
def test_500_random_requests_after_ready_find_nothing_to_compile(server: Running) -> None:
    ask_random(server, 500)


def test_random_requests_after_ready_find_nothing_to_compile(server: Running) -> None:
    ask_random(server, 40)


def ask_random(server: Running, count: int) -> None:
    """Send requests of random shapes, some of them side by side."""
    draw = random.Random(7)
    misses = len(server.misses)
    for _ in range(count // 4):
        prompts = [[draw.randrange(96) for _ in range(draw.randrange(1, 90))] for _ in range(4)]
        body = {"prompt": prompts, "max_tokens": draw.randrange(1, 6), "temperature": draw.choice([0, 1.0])}
        status, _, answer = server.ask("POST", "/v1/completions", body)
        assert (status, len(answer["choices"])) == (200, 4)
    assert server.misses[misses:] == []


def test_kinds_of_shapes() -> None:
    counts = {1: "1", 2: "2-2", 3: "3-4", 16: "9-16 (of 16)", 17: "17-32", 48: "33-64 (of 16)"}
    assert {count: count_class(count) for count in counts} == counts
    coverage = Coverage()
    coverage.note(StepShape("decode", 1, 1, 5))
    coverage.arm()
    assert coverage.ratio == 1.0
    assert coverage.note(StepShape("prefill", 20, 1, 20)) is True
    assert coverage.note(StepShape("prefill", 31, 1, 31)) is False
    assert coverage.note(StepShape("decode", 1, 1, 9)) is False
    assert coverage.ratio == 0.5


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    found = [
        Specialisation("Triton", "kernel {'0': 'i32'}", StepShape("prefill", 20, 2, 17)),
        Specialisation("g++", "", None),
        Specialisation("Dynamo", "f", StepShape("prefill", 20, 2, 17)),
    ]
    for each in found:
        manifest.append(file, each)
    assert list(manifest.read(file)) == found
    assert manifest.shapes_in(found) == (StepShape("prefill", 20, 2, 17),)
    assert str(found[0]) == "Triton: kernel {'0': 'i32'} (prefill, 20 tokens, 2 sequences, longest 17)"
    for line, said in (
        ("{", "f.jsonl:4 is not JSON"),
        ("[]", "f.jsonl:4 is not a line of a manifest in format 1"),
        ('{"format": 1}', "f.jsonl:4 lacks a field: 'kind'"),
        ('{"format": 1, "kind": "a", "shape": {"phase": "x"}}', "f.jsonl:4 lacks a field"),
    ):
        file.write_text("".join(json.dumps(each.as_dict()) + "\n" for each in found) + line)
        with pytest.raises(OptionError, match=said):
            manifest.read(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [("1,2", "not understood"), ("sizes=", "not understood"), ("sizes=a", "is no size"), ("sizes=9-2", "is no size")],
)
def test_a_sweep_that_says_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse_sweep(text)
