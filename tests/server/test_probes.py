"""Probes tell how far a start is, and nothing is served before; metrics are read by Prometheus' own parser."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from piecework.errors import EngineError, ModelError
from piecework.server.readiness import COMPILING, LOADING, Readiness
from server.serving import NAME, Running, ask, running


def test_before_the_weights_are_in_probes_answer_and_requests_are_told_to_wait(folder: Path) -> None:
    may_load = threading.Event()
    with running(folder, before_engine=may_load, wait=False) as server:
        status, headers, body = server.ask("GET", "/readyz")
        assert (status, headers["retry-after"], body["phase"], body["ready"]) == (503, "2", "loading", False)
        assert server.ask("GET", "/livez")[0] == 200
        assert server.ask("GET", "/health")[0] == 503
        for path in ("/v1/models", f"/v1/models/{NAME}"):
            assert server.ask("GET", path)[0] == 503
        with pytest.raises(openai.InternalServerError, match="the model is not served now: loading") as caught:
            server.client().completions.create(model=NAME, prompt="w1")
        assert caught.value.response.headers["retry-after"] == "2"
        may_load.set()
        # A client that comes back as it is told to is served.
        assert server.client(max_retries=10).completions.create(model=NAME, prompt="w1").usage is not None
        body = server.ask("GET", "/readyz")[2]
        assert (body["ready"], body["phase"], body["detail"]) == (True, "ready", "ready")
        assert [each["phase"] for each in body["phases"]] == ["starting", "loading", "checking", "ready"]


def test_the_port_may_open_with_the_weights(folder: Path) -> None:
    may_load = threading.Event()
    threading.Timer(0.3, may_load.set).start()
    began = time.monotonic()
    with running(folder, before_engine=may_load, wait=False, open_port="weights") as server:
        assert may_load.is_set() and time.monotonic() > began + 0.3
        assert server.ask("GET", "/readyz")[0] in (200, 503)


def test_progress_in_words() -> None:
    now = [0.0]
    readiness = Readiness(clock=lambda: now[0])
    readiness.enter(LOADING, 200, "bytes")
    readiness.advance(124)
    assert readiness.as_dict()["detail"] == "loading 62 %"
    now[0] = 5.0
    readiness.enter(COMPILING, 3)
    readiness.advance(2)
    found = readiness.as_dict()
    assert (found["detail"], found["done"], found["total"]) == ("compiling 2/3", 2, 3)
    assert found["phases"][1]["elapsed_s"] == 5.0
    readiness.ready()
    readiness.beside("capturing", 12, 35)
    found = readiness.as_dict()
    assert (found["ready"], found["beside"][0]["detail"]) == (True, "capturing 12/35")
    readiness.fail("the device is gone")
    readiness.ready()
    assert readiness.as_dict()["detail"] == "failed: the device is gone"


def test_health_has_a_forward_behind_it(server: Running) -> None:
    assert server.service is not None
    server.front.metrics.last_output = float("-inf")
    before = server.service.status.num_steps
    assert server.ask("GET", "/health")[0] == 200
    assert server.service.status.num_steps == before + 1
    assert server.ask("GET", "/health")[0] == 200  # the token just computed is proof enough
    assert server.service.status.num_steps == before + 1


def test_an_engine_that_hangs_is_not_healthy_and_one_that_fails_ends_the_server(folder: Path) -> None:
    hang, fail = threading.Event(), threading.Event()

    class Hanging:
        def __init__(self, runner: object) -> None:
            self.runner = runner

        def run(self, batch: object) -> object:
            while hang.is_set() and not fail.is_set():
                time.sleep(0.01)
            if fail.is_set():
                raise RuntimeError("the device is gone")
            return self.runner.run(batch)  # type: ignore[attr-defined]

    def alter(engine: object) -> None:
        engine.runner = Hanging(engine.runner)  # type: ignore[attr-defined]

    with running(folder, alter=alter, health_timeout_s=0.3) as server:
        hang.set()
        server.front.metrics.last_output = float("-inf")
        status, _, body = server.ask("GET", "/health")
        assert (status, body["detail"]) == (503, "no token came within 0.3 seconds")
        assert server.ask("GET", "/livez")[0] == 200
        fail.set()
        end = time.monotonic() + 10
        while server.error is None and time.monotonic() < end:
            time.sleep(0.01)
        assert isinstance(server.error, EngineError)
        assert (server.error.message, server.error.exit_code) == ("RuntimeError: the device is gone", 1)
        assert server.front.readiness.as_dict()["detail"] == "failed: RuntimeError: the device is gone"


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with running(tmp_path / "none", wait=False) as server:
        end = time.monotonic() + 10
        while server.error is None and time.monotonic() < end:
            time.sleep(0.01)
    assert isinstance(server.error, ModelError)
    assert "there is no model folder at" in server.front.readiness.as_dict()["detail"]


def test_metrics_are_what_dashboards_know(server: Running) -> None:
    client = server.client()
    before = values(server)
    list(client.completions.create(model=NAME, prompt="w1 w2 w3", max_tokens=5, stream=True))
    client.completions.create(model=NAME, prompt="w1 w2 w3", max_tokens=5, n=2)
    after = values(server)
    label = (("model_name", NAME),)

    def grown(name: str, *labels: tuple[str, str]) -> float:
        return after[name, labels or label] - before.get((name, labels or label), 0.0)

    assert grown("vllm:prompt_tokens_total") == 6
    assert grown("vllm:generation_tokens_total") == 15
    assert grown("vllm:request_success_total", ("finished_reason", "length"), ("model_name", NAME)) == 3
    assert grown("vllm:time_to_first_token_seconds_count") == 3
    assert grown("vllm:inter_token_latency_seconds_count") == 12
    assert grown("vllm:e2e_request_latency_seconds_count") == 2
    assert grown("piecework_tier_tokens_total", ("tier", "0")) == 15
    assert grown("piecework_http_requests_total", ("route", "/v1/completions"), ("status", "200")) == 2
    assert after["vllm:num_requests_running", label] == after["vllm:kv_cache_usage_perc", label] == 0
    assert after["piecework_ready", ()] == 1


def values(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Read a scrape."""
    text = ask(server.port, "GET", "/metrics")[2]
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
