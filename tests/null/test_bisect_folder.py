"""Bisect over a model folder: the step, the site, the tokens; and the command that prints it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import piecework as pw
from piecework.cli.main import run
from piecework.diagnostics.bisect import COMPILE, EQUAL
from piecework.diagnostics.bisect_folder import bisect_folder, finding_lines
from piecework.errors import OptionError
from piecework.store.disk import DiskStore
from piecework.store.protocol import ARTIFACT
from planted_compilers import off_by_one_percent
from tiny_models import tiny_folder

OPTIONS = pw.CompileOptions(compiler="eager", max_num_batched_tokens=16, ranges=((1, 16),))
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("llama", tmp_path_factory.mktemp("model") / "llama")


def alter(store: Any, wanted: Callable[[str, str], bool]) -> int:
    """Make the first result of some artifacts larger by 1 %: those of whose text and box `wanted` is true."""
    count = 0
    for key in store.list_records(ARTIFACT):
        record = dict(store.read_record(ARTIFACT, key))
        text = store.read_blob(record["text"]).decode()
        if wanted(text, record["factors"]["range"]):
            count += 1
            store.write_record(ARTIFACT, key, {**record, "text": store.write_blob(off_by_one_percent(text).encode())})
    return count


def test_nothing_is_found_where_nothing_is_wrong(model: Path) -> None:
    found = bisect_folder(model, PROMPT, options=OPTIONS, store=pw.MemoryStore(), max_tokens=4)
    data = found.as_dict()
    assert (data["stage"], len(found.tokens)) == (EQUAL, 4)
    assert data["logits"]["largest_error"] < 1e-6  # linears that were merged add up in another order
    assert data["greedy"]["equal"] and data["sampling"] == {"equal_on_equal_logits": True, "equal_on_own_logits": True}
    assert finding_lines(found)[0] == "every stage gives what the model gives, within the tolerance"


def test_a_fault_at_one_token_shows_on_the_second_step(model: Path, tmp_path: Path) -> None:
    store = pw.MemoryStore()
    bisect_folder(model, PROMPT, options=OPTIONS, store=store, max_tokens=1)
    assert alter(store, lambda text, box: "silu" in text and box == "s0=1" and text.count("silu") == 1) >= 1
    found = bisect_folder(model, PROMPT, options=OPTIONS, store=store, max_tokens=6, folder=tmp_path / "repro")
    data = found.as_dict()
    assert (data["stage"], data["step"], data["origin"]) == (COMPILE, "token", "stored artifact")
    assert data["region"] == 2 and data["range"] == "s0=1" and 0.009 < data["error"] < 0.011
    assert (tmp_path / "repro" / "repro.py").is_file()
    assert data["logits"]["largest_error"] > 1e-4


def test_levels_stay_apart(model: Path) -> None:
    """Logits drift by 1 %; whether tokens differ is another question, and a draw from equal logits a third."""
    store = pw.MemoryStore()
    bisect_folder(model, PROMPT, options=OPTIONS, store=store, max_tokens=1)
    alter(store, lambda text, box: "silu" in text)
    found = bisect_folder(model, PROMPT, options=OPTIONS, store=store, max_tokens=4)
    data = found.as_dict()
    assert (data["stage"], data["step"]) == (COMPILE, "prompt")
    assert data["logits"]["largest_error"] > 1e-4
    assert data["sampling"]["equal_on_equal_logits"]
    differing = [step for step in found.tokens if step.token != step.other]
    assert data["greedy"]["equal"] == (not differing)


def test_the_command_says_what_it_found(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    command = [
        "bisect",
        str(model),
        "--prompt-ids",
        "5,6,7",
        "--max-tokens",
        "2",
        "--compiler",
        "eager",
        "--store",
        str(store),
    ]
    command += ["--max-num-batched-tokens", "16", "--ranges", "1-16"]
    assert run(command) == 0
    assert "every stage gives what the model gives" in capsys.readouterr().out
    alter(DiskStore(store), lambda text, box: "silu" in text)
    assert run([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["stage"] == COMPILE
    assert run(["bisect", str(model)]) == 2
    assert "give `--prompt TEXT` or `--prompt-ids 1,2,3`" in capsys.readouterr().err


def test_what_cannot_be_bisected_is_refused(model: Path) -> None:
    with pytest.raises(OptionError, match="the prompt has 17 tokens; one step takes 1 to 16"):
        bisect_folder(model, list(range(17)), options=OPTIONS, store=pw.MemoryStore())
    with pytest.raises(OptionError, match="mode `stock` has no stages"):
        bisect_folder(model, PROMPT, options=pw.CompileOptions(mode="stock"), store=pw.MemoryStore())
