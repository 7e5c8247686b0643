"""Without an observer, the log tells how a cold start gets on, and a warm start says nothing."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import piecework as pw


def test_a_cold_start_tells_of_each_artifact_and_a_warm_one_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    store = pw.MemoryStore()
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64)

    def start() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "piecework"):
            example = (torch.ones(3, 4),)
            pw.compile(nn.Linear(4, 4).eval(), example, dynamic={"input": {0: "tokens"}}, options=options, store=store)
        return [record.getMessage() for record in caplog.records if record.name == "piecework"]

    cold = start()
    assert "no stored program is used: nothing is stored under these factors" in cold
    assert "1 regions, 1 distinct pieces" in cold
    assert [line.rpartition(" in ")[0] for line in cold if line.startswith("compiled ")][-1].endswith("for s0=2-64")
    assert start() == []
