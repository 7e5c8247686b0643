"""What Prometheus scrapes: the names that dashboards of vLLM know, and ours.

The numbers of the engine are read from its status at each scrape; the front counts what it sees itself.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from piecework.engine.options import Status
from piecework.engine.sequence import Output

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCIES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        disable_created_metrics()  # of each counter when it began: as many lines again, which nobody reads
        self.registry = CollectorRegistry()
        self.clock = clock
        self.model_name = model_name
        self.last_output = float("-inf")
        self.tokens_by_tier: Counts[int] = Counts()
        one: dict[str, Any] = {"labelnames": ("model_name",), "registry": self.registry}
        label = (model_name,)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Tokens of prompts.", **one).labels(*label)
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens generated.", **one).labels(*label)
        self._success = Counter(
            "vllm:request_success", "Answers that ended.", ("model_name", "finished_reason"), registry=self.registry
        )
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From a request to its first token.", buckets=_LATENCIES, **one
        ).labels(*label)
        self.between = Histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", buckets=_BETWEEN, **one
        ).labels(*label)
        self.whole = Histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its end.", buckets=_LATENCIES, **one
        ).labels(*label)
        self._prompt_size = Histogram(
            "vllm:request_prompt_tokens", "Tokens of a request's prompts.", buckets=_TOKENS, **one
        ).labels(*label)
        self._answer_size = Histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", buckets=_TOKENS, **one
        ).labels(*label)
        ours: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "piecework_http_requests", "Requests answered, by route and status.", ("route", "status"), **ours
        )
        self.tier_tokens = Counter("piecework_tier_tokens", "Tokens generated, by tier.", ("tier",), **ours)
        self.misses = Counter("piecework_jit_misses", "Compiles after the start, by compiler.", ("kind",), **ours)
        self.ready = Gauge("piecework_ready", "1 while requests are taken.", **ours)
        self.coverage = Gauge(
            "piecework_startup_coverage", "Served shapes that the start had run, of all served shapes.", **ours
        )
        self.coverage.set(1.0)
        self.shapes = Gauge("piecework_shapes", "Shapes served so far, by whether the start had run them.",
                            ("state",), **ours)  # fmt: skip

    def watch_request(self, num_prompts: int, num_prompt_tokens: int) -> RequestWatch:
        """Begin to time a request."""
        self._prompt_size.observe(num_prompt_tokens)
        self.prompt_tokens.inc(num_prompt_tokens)
        return RequestWatch(self)

    def cover(self, num_covered: int, num_met: int) -> None:
        """Note how many of the shapes met by serving the start had run."""
        self.coverage.set(num_covered / num_met if num_met else 1.0)
        self.shapes.labels("covered").set(num_covered)
        self.shapes.labels("uncovered").set(num_met - num_covered)

    def finished(self, reason: str) -> None:
        """Count an answer that ended."""
        self._success.labels(self.model_name, reason).inc()

    def sized(self, num_tokens: int) -> None:
        """Note how many tokens a request got."""
        self._answer_size.observe(num_tokens)

    def follow(self, status: Callable[[], Status]) -> None:
        """Read the engine's status at each scrape from now on."""
        self.registry.register(_EngineNumbers(status, self.model_name))

    def text(self) -> bytes:
        """Return what a scrape gets."""
        return generate_latest(self.registry)


class RequestWatch:
    """Times one request, token by token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = metrics.clock()
        self._latest: dict[tuple[str, int], float] = {}
        self._num_tokens = 0

    def output(self, output: Output) -> None:
        """Take note of what a step gave."""
        metrics, now = self._metrics, self._metrics.clock()
        metrics.last_output = now
        place = (output.request_id, output.index)
        before = self._latest.get(place)
        count = len(output.token_ids)
        if before is None:
            metrics.first_token.observe(now - self._began)
        elif count:
            metrics.between.observe(now - before)
        self._latest[place] = now
        self._num_tokens += count
        metrics.generation_tokens.inc(count)
        metrics.tokens_by_tier[output.tier] += count
        metrics.tier_tokens.labels(str(output.tier)).inc(count)
        if output.finish_reason is not None:
            metrics.finished(output.finish_reason)

    def end(self) -> None:
        """Note that the request has ended, one way or another."""
        self._metrics.whole.observe(self._metrics.clock() - self._began)
        self._metrics.sized(self._num_tokens)


class _EngineNumbers(Collector):
    """Reads an engine's status when it is scraped."""

    def __init__(self, status: Callable[[], Status], model_name: str) -> None:
        self._status = status
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Name nothing before there is an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the numbers of now."""
        status = self._status()
        used = 1 - status.num_free_pages / status.num_pages if status.num_pages else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Answers that are being computed.", status.num_running),
            ("vllm:num_requests_waiting", "Answers that wait for a place.", status.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache's pages in use, 0 to 1.", used),
            ("vllm:gpu_cache_usage_perc", "The same, by its older name.", used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge
        for name, text, value in (
            ("vllm:num_preemptions", "Answers sent back to wait because pages ran out.", status.num_preempted),
            ("vllm:prefix_cache_hits", "Prompt tokens found in pages that were there.", status.num_cached_tokens),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked for in pages.",
                status.num_cached_tokens + status.num_prompt_tokens,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=("model_name",))
            counter.add_metric((self._model_name,), value)
            yield counter
        yield GaugeMetricFamily("piecework_tier", "The best tier that serves: 0 eager, 1 compiled, 2 captured.",
                                value=status.tier)  # fmt: skip
        steps = CounterMetricFamily("piecework_tier_steps", "Steps by tier.", labels=("tier",))
        for tier, count in enumerate(status.steps_by_tier):
            steps.add_metric((str(tier),), count)
        yield steps
        yield CounterMetricFamily("piecework_steps", "Steps of the engine.", value=status.num_steps)
        yield GaugeMetricFamily("piecework_cache_pages", "Pages of the cache.", value=status.num_pages)
