"""Malformed, huge, slow and vanishing clients get their answer or none, and change nothing for others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from server.serving import NAME, Running, running

PROMPT = "w5 w6 w7 w8"
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Running]:
    """Serve with limits that a test reaches."""
    limits = {"max_body_bytes": 20_000, "max_requests": 4, "body_timeout_s": 0.5, "write_timeout_s": 1.0}
    with running(folder, **limits) as found:
        yield found


@pytest.fixture
def steady(small: Running) -> Iterator[None]:
    """Hold the server to one answer before, while and after a test does its worst."""
    ask = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    wanted = small.ask("POST", "/v1/completions", ask)[2]["choices"][0]["text"]
    found: list[str] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            found.append(small.ask("POST", "/v1/completions", ask)[2]["choices"][0]["text"])

    thread = threading.Thread(target=keep_asking)
    thread.start()
    yield
    stop.set()
    thread.join()
    assert found and set(found) == {wanted}
    small.wait_idle()
    assert small.front.gate.num_inside == 0
    assert small.misses == []


@pytest.mark.parametrize(
    "body",
    [
        "", "{", "[]", "null", "1", '"text"', "{}", '{"prompt": null}', '{"prompt": {}}', '{"prompt": [1, "a"]}',
        '{"prompt": [1.5]}', '{"prompt": [-1]}', '{"prompt": [true]}', '{"prompt": [[]]}', '{"prompt": [[1], "a"]}',
        '{"prompt": "w1", "max_tokens": 0}', '{"prompt": "w1", "max_tokens": "9"}', '{"prompt": "w1", "n": 1e99}',
        '{"prompt": "w1", "temperature": NaN}', '{"prompt": "w1", "top_p": Infinity}', '{"prompt": "w1", "stop": [""]}',
        '{"prompt": "w1", "stop": 5}', '{"prompt": "w1", "n": 0}', '{"prompt": "w1", "seed": 1e400}',
        '{"prompt": "w1", "stream_options": {"include_usage": true}}', '{"prompt": "\\ud800", "model": "\\ud800"}',
        "[" * 5000 + "]" * 5000, '{"a":' * 3000 + "1" + "}" * 3000, "\x00\x01",
        '{"prompt": "w1", "prompt_ids": ' + "9" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_request_is_told_so(server: Running, body: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, _, answer = server.ask("POST", path, body)
        assert 400 <= status < 500, (path, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code", "hint"}
        assert answer["error"]["message"]


def test_lone_surrogates_are_text_like_any_other(server: Running) -> None:
    status, _, answer = server.ask("POST", "/v1/completions", '{"prompt": "w1 \\ud83d", "max_tokens": 1, "echo": true}')
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)


@pytest.mark.usefixtures("steady")
def test_a_body_that_is_too_long_is_not_read(small: Running) -> None:
    status, headers, answer = small.ask("POST", "/v1/completions", {"prompt": "w1 " * 10_000})
    assert (status, answer["error"]["code"], headers["connection"]) == (413, "body_too_long", "close")
    # Without a length, and with one that is no number.
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b"413" in raw(small.port, chunked + b"3e8\r\n%b\r\n" % (b"a" * 1000) * 25)
    endless = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 15 + b"\r\n\r\n"
    assert b"413" in raw(small.port, endless)


@pytest.mark.usefixtures("steady")
def test_a_body_that_does_not_come_is_given_up(small: Running) -> None:
    answer = raw(small.port, b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{"prompt"')
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 408 " in head.splitlines()[0]
    assert json.loads(body)["error"]["code"] == "slow_body"


@pytest.mark.usefixtures("steady")
def test_clients_that_vanish_leave_nothing_behind(small: Running) -> None:
    for number in range(12):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "stream": bool(number % 2)}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", small.port), timeout=10) as gone:
            gone.sendall(head % len(body) + body)
            if number % 3:
                time.sleep(0.02)
        end = time.monotonic() + 10
        while small.front.gate.num_inside > 2 and time.monotonic() < end:
            time.sleep(0.01)
    assert small.service is not None
    end = time.monotonic() + 10
    while small.service.status.num_running > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert small.service.status.num_running <= 1


@pytest.mark.usefixtures("steady")
def test_what_is_no_http_is_closed(small: Running) -> None:
    for sent in (b"\x16\x03\x01\x02\x00" * 20, b"GET\r\n\r\n", b"A" * 200_000 + b"\r\n\r\n"):
        answer = raw(small.port, sent)
        assert answer == b"" or b" 400 " in answer.splitlines()[0]


def test_one_request_too_many_is_told_when_to_come_back(small: Running) -> None:
    client = small.client()
    streams = [
        client.completions.create(model=NAME, prompt=PROMPT, max_tokens=250, temperature=0, stream=True)
        for _ in range(4)
    ]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="4 answers are under way, and this server takes 4") as caught:
        client.completions.create(model=NAME, prompt=PROMPT)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.BadRequestError, match="`5` answers were asked for at once"):
        client.completions.create(model=NAME, prompt=PROMPT, n=5)
    for stream in streams:
        stream.close()
    small.wait_idle()
    assert client.with_options(max_retries=5).completions.create(model=NAME, prompt=PROMPT).choices[0].text


def raw(port: int, sent: bytes) -> bytes:
    """Send bytes as they are, and return what comes until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        found = b""
        try:
            connection.sendall(sent)
            while chunk := connection.recv(65536):
                found += chunk
        except (ConnectionResetError, BrokenPipeError):
            pass
        return found
