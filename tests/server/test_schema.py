"""Cases drawn from the server's own OpenAPI schema: whatever is sent, no answer is the server's fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from server.serving import running


def hold(folder: Path, count: int) -> None:
    """Send `count` cases to all routes together, half of them to those that generate, and look at each answer."""
    with running(folder, max_choices=8) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        posts = [operation for operation in operations if operation.method == "post"]
        assert {each.path for each in posts} == {
            "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
        }  # fmt: skip
        num_sent = 0
        for operation in operations:
            share = -(-9 * count // (10 * len(posts))) if operation in posts else -(-count // (10 * len(operations)))
            statuses = try_cases(operation, share)
            assert statuses and max(statuses) < 500, operation.label
            num_sent += len(statuses)
        assert num_sent >= count * 0.9
        assert server.misses == []
        server.wait_idle()


def try_cases(operation: Any, count: int) -> list[int]:
    """Send cases of one operation; return the status of each."""
    statuses: list[int] = []

    @seed(1)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def try_one(case: Any) -> None:
        answer = case.call(timeout=30)
        statuses.append(answer.status_code)
        case.validate_response(answer, checks=[not_a_server_error, status_code_conformance])

    try_one()
    return statuses


@pytest.mark.slow
def test_a_hundred_cases(folder: Path) -> None:
    hold(folder, 120)


@pytest.mark.soak
def test_two_thousand_cases(folder: Path) -> None:
    hold(folder, 2000)
