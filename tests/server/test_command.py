"""The commands `serve` and `prewarm` as they are typed: what they refuse, and what they print."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from e2e.command import piecework

SMALL = ("--num-pages", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--enforce-eager")


def test_serve_once_answers_lists_what_it_caused_and_exits(folder: Path, tmp_path: Path) -> None:
    done = piecework("serve", folder, "--port", "0", "--serve-once", "w5 w6 w7", "--json", *SMALL)
    assert done.code == 0, done.err
    found = done.document
    assert found["text"].startswith("w") and found["usage"]["prompt_tokens"] == 3
    assert found["specialisations"] == []
    assert (found["coverage"], list(found["uncovered"])) == (0.5, ["prefill 3-4 tokens, 1 sequences"])
    # A start that has run the size covers it; the words on standard error say the same.
    sweep = ("--sweep", "sizes=3", "--api-key", "secret")
    done = piecework("serve", folder, "--port", "0", "--serve-once", "w5 w6 w7", *sweep, *SMALL)
    assert done.code == 0, done.err
    assert done.out.strip() == found["text"]
    assert "specialisations that this request caused: 0" in done.err
    assert "shapes that the start had not run: 0" in done.err
    assert [line for line in done.err.splitlines() if line.endswith("prewarming")]


def test_prewarm_runs_a_manifest(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "misses.jsonl"
    shapes = [
        {"phase": "prefill", "num_tokens": 5, "num_sequences": 1, "longest": 5},
        {"phase": "decode", "num_tokens": 4, "num_sequences": 4, "longest": 9},
        {"phase": "decode", "num_tokens": 9, "num_sequences": 9, "longest": 9},
    ]
    file.write_text("".join(json.dumps({"format": 1, "kind": "Triton", "shape": shape}) + "\n" for shape in shapes))
    done = piecework("prewarm", folder, "--manifest", file, "--json", *SMALL)
    assert (done.document["shapes"], done.document["refused"]) == (shapes, shapes[2:])
    assert (done.code, done.document["specialisations"]) == (1, [])
    file.write_text("\n".join(file.read_text().splitlines()[:2]))
    done = piecework("prewarm", folder, "--manifest", file, *SMALL)
    assert (done.code, done.out) == (0, "2 of 2 shapes run, 0 compiles\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--port", "70000"), 2, "port `70000` is no port"),
        (("--open-port", "never"), 2, "`--open-port never` is unknown"),
        (("--max-requests", "0"), 2, "`max_requests` is `0`"),
        (("--drain-timeout-s", "-1"), 2, "`drain_timeout_s` is `-1.0`"),
        (("--api-key", ""), 2, "an API key is empty"),
        (("--host", "nowhere.invalid"), 2, "`nowhere.invalid` is no address"),
        (("--sweep", "1,2"), 2, "`--sweep 1,2` is not understood"),
        (("--wait-for", "never"), 2, "`wait_for` is `never`"),
        (("--chat-template", "/nowhere.jinja"), 1, "the chat template `/nowhere.jinja` cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused(folder: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    port = () if "--port" in arguments else ("--port", "0")
    done = piecework("serve", folder, *port, *arguments, "--serve-once", "w1")
    assert (done.code, said in done.err) == (code, True), done.err
    assert "hint: " in done.err


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = piecework("serve", tmp_path / "none", "--port", str(taken.getsockname()[1]))
    assert done.code == 2
    assert "cannot be taken: Address already in use" in done.err and "`--port` gives another" in done.err


def test_a_model_that_is_not_there_has_its_own_exit_code(tmp_path: Path) -> None:
    done = piecework("serve", tmp_path / "none", "--port", "0")
    assert (done.code, "there is no model folder at" in done.err) == (1, True)
    assert piecework("prewarm", tmp_path / "none").code == 2
