"""The traffic of programs that are not cut before they are compiled, and of merged linears: counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecework.diagnostics.traffic.model import Traffic
from piecework.diagnostics.traffic.step import StepSizes, record_traffic
from traffic_plans import configured, plan


def products_of(found: Traffic) -> list[tuple[int, int]]:
    every = [each for one in found.sites for each in one.operators * one.sites]
    return [(each.read_bytes, each.written_bytes) for each in every if each.operator == "aten::mm"]


@pytest.mark.parametrize("partition", [pytest.param("inductor", marks=pytest.mark.slow), "none"])
def test_a_graph_that_stays_whole_moves_what_its_pieces_move(partition: str, tmp_path: Path) -> None:
    folder = configured(tmp_path)
    found, cut = (record_traffic(*plan(folder, partition=each), StepSizes(4, 4, 20)) for each in (partition, "fx"))
    assert [(one.name, one.sites) for one in found.sites] == [("piece 0", 1)]
    for name in ("weight_bytes", "kv_read_bytes", "kv_written_bytes", "unknown"):
        assert getattr(found, name) == getattr(cut, name)
    assert (found.step.eager_bytes, found.step.operator_bytes) == (cut.step.eager_bytes, cut.step.operator_bytes)
    # What a layer leaves for the next but one region need not be written for a kernel that follows in the same piece.
    assert 0 < found.step.fused_bytes <= cut.step.fused_bytes
    assert sorted(products_of(found)) == sorted(products_of(cut))


@pytest.mark.parametrize("partition", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_merged_linears_read_their_input_once(partition: str, tmp_path: Path) -> None:
    folder = configured(tmp_path)
    merged = plan(folder, passes=("no_ops", "merge_linears_everywhere"), partition=partition)
    apart = plan(folder, passes=("no_ops",), partition=partition)
    found, plain = (record_traffic(*each, StepSizes(4, 4, 20)) for each in (merged, apart))
    row, half = 4 * 32 * 2, 4 * 16 * 2  # of four tokens: a row of the model, and one of keys or values
    layer = [
        (row + 64 * 32 * 2, 4 * 64 * 2),  # queries, keys and values
        (row + 32 * 32 * 2, row),
        (row + 96 * 32 * 2, 4 * 96 * 2),  # gate and up
        (4 * 48 * 2 + 32 * 48 * 2, row),
    ]
    assert sorted(products_of(found)) == sorted([*layer * 3, (row + 96 * 32 * 2, 4 * 96 * 2)])
    assert len(products_of(plain)) == 3 * 7 + 1
    assert found.weight_bytes == plain.weight_bytes
    # Three products less that read the row; the values, a strided part of the product, are copied for the KV write.
    assert plain.step.eager_bytes - found.step.eager_bytes == 3 * (3 * row - 2 * half)
