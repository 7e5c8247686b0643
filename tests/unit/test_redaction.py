"""What must not leave a machine is taken out of text, whether it is known or only looks like it."""

from __future__ import annotations

import json

import pytest

from piecework.diagnostics.redaction import REMOVED, Redaction

REDACTION = Redaction.of(
    {"HF_TOKEN": "plain-word-token", "MY_SECRET": 'with"quote\\and', "SHORT_KEY": "x", "PATH": "/usr/bin"},
    {"home": "/home/alice", "model": "/home/alice/models/tiny", "python": "/opt/python"},
    {"user": "alice", "host": "alices-laptop"},
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("token plain-word-token.", f"token {REMOVED}."),
        ("https://alice:hunter2@example.org/simple", f"https://{REMOVED}@example.org/simple"),
        ("GET https://example.org/x?a=1&token=abc#z", f"GET https://example.org/x?a=1&{REMOVED}#z"),
        ("Authorization: Bearer abcdefgh1234", f"Authorization: Bearer {REMOVED}"),
        ("hf_abcdefghijklmnopqrst", REMOVED),
        ("/home/alice/models/tiny/config.json", "[model]/config.json"),
        ("/home/alice/.cache/x", "[home]/.cache/x"),
        ("/home/alicent/x.py", "…/x.py"),
        ('File "/srv/app/lib/python3.11/site-packages/torch/_ops.py", line 3', 'File "…/torch/_ops.py", line 3'),
        ("saved by alice on alices-laptop", "saved by [user] on [host]"),
        ("malice aforethought", "malice aforethought"),
    ],
)
def test_what_is_taken_out(text: str, wanted: str) -> None:
    assert REDACTION.apply(text) == wanted


def test_a_secret_is_found_in_json_too() -> None:
    assert 'quote' not in REDACTION.apply(json.dumps({"value": 'with"quote\\and'}))


@pytest.mark.parametrize(
    "text",
    ["[1000/0]", "s0=2-64", "a/b/c", "x // 16 / 2", "https://example.org/a/b", "1/2/3", "piece 0 (0a0e)", "skip_this"],
)
def test_what_stays(text: str) -> None:
    assert REDACTION.apply(text) == text


def test_redacted_json_is_json() -> None:
    value = {"path": "/home/alice/models/tiny/a b/config.json", "url": "https://u:p@h/x?key=1", "text": "/a/b\n/c/d"}
    assert json.loads(REDACTION.apply(json.dumps(value))).keys() == value.keys()
