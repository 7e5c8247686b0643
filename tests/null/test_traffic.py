"""The traffic model: every byte by hand, for operators of the registry, functions and whole models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.diagnostics.amounts import bytes_text, time_text
from piecework.diagnostics.traffic.bandwidth import measure_bandwidth, read_bandwidth
from piecework.diagnostics.traffic.model import SiteTraffic, Traffic
from piecework.diagnostics.traffic.operators import OperatorCall, is_operator, read_shape, read_value
from piecework.diagnostics.traffic.step import (
    StepSizes,
    kv_bytes,
    model_traffic,
    operator_traffic,
    record_traffic,
    step_sizes,
)
from piecework.diagnostics.traffic.text import traffic_lines
from piecework.errors import OptionError
from piecework.events import ignore
from piecework.options import CompileOptions
from piecework.store.memory import MemoryStore
from piecework.store.protocol import Store
from piecework.values.record import Record
from traffic_plans import configured, plan

NORM = "fused_add_rms_norm"


def norm(tokens: int, sites: int = 1, **call: object) -> Traffic:
    return operator_traffic(NORM, OperatorCall(**call), tokens, sites)  # type: ignore[arg-type]


def only(traffic: Traffic) -> SiteTraffic:
    (site,) = traffic.sites
    return site


def rows(traffic: Traffic) -> list[tuple[str, int, int]]:
    return [(each.operator, each.read_bytes, each.written_bytes) for each in only(traffic).operators]


def test_one_token_of_a_wide_norm_is_eleven_operators() -> None:
    found = norm(1)
    half, full = 2 * 4096, 4 * 4096
    assert rows(found) == [
        ("aten::_to_copy", half, full),
        ("aten::_to_copy", half, full),
        ("aten::add.Tensor", 2 * full, full),
        ("aten::_to_copy", full, half),
        ("aten::pow.Tensor_Scalar", full, full),
        ("aten::mean.dim", full, 4),
        ("aten::add.Tensor", 4, 4),
        ("aten::rsqrt", 4, 4),
        ("aten::mul.Tensor", full + 4, full),
        ("aten::_to_copy", full, half),
        ("aten::mul.Tensor", 2 * half, half),
    ]
    columns = only(found).columns
    assert (columns.eager_bytes, columns.operator_bytes, columns.fused_bytes) == (253_976, 40_960, 40_960)
    assert f"{columns.ratio:.1f}" == "6.2"
    assert only(found).groups == (40_960,)


def test_sites_add_up_and_take_time() -> None:
    one, many = norm(1, 64).step, norm(256, 64).step
    assert bytes_text(one.difference_bytes) == "13.63 MB"
    assert f"{many.ratio:.1f}" == "7.5"
    assert bytes_text(many.difference_bytes) == "3.49 GB"
    assert time_text(one.difference_bytes / 3.35e12) == "4.07 µs"
    assert time_text(many.difference_bytes / 3.35e12) == "1.04 ms"


def test_a_weight_row_is_read_once_a_call() -> None:
    one, many = only(norm(1)), only(norm(256))
    activations = 253_976 - 8192, 40_960 - 8192
    assert many.columns.eager_bytes == 256 * activations[0] + 8192
    assert many.columns.fused_bytes == 256 * activations[1] + 8192
    assert one.weight_bytes == many.weight_bytes == 8192


def test_a_function_of_the_same_text_moves_the_same() -> None:
    ours, theirs = only(norm(5)), only(operator_traffic("traffic_functions:add_norm", OperatorCall(), 5))
    assert ours.columns == theirs.columns
    assert [each.size_bytes for each in ours.operators] == [each.size_bytes for each in theirs.operators]


def test_casts_to_the_same_dtype_materialise_nothing() -> None:
    found = norm(3, hidden=2048, dtype="float32")
    row = 4 * 2048
    assert [name for name, _, _ in rows(found)] == [
        "aten::add.Tensor", "aten::pow.Tensor_Scalar", "aten::mean.dim", "aten::add.Tensor", "aten::rsqrt",
        "aten::mul.Tensor", "aten::mul.Tensor",
    ]  # fmt: skip
    assert only(found).columns.eager_bytes == 3 * (10 * row + 24) + row == 254_024
    assert only(found).columns.fused_bytes == 3 * 4 * row + row == 106_496


def test_another_width_dtype_and_count() -> None:
    found = only(norm(5, hidden=3072, dtype="float16"))
    half, full = 2 * 3072, 4 * 3072
    assert found.columns.eager_bytes == 5 * (6 * half + 12 * full + 24) + half == 927_864
    assert found.columns.fused_bytes == 5 * 4 * half + half == 129_024
    assert len(found.operators) == 11


def test_a_mean_over_part_of_a_row_reads_that_part() -> None:
    found = only(norm(1, values={"variance_size": 128}))
    assert found.columns.eager_bytes == 253_976 - 3 * 16_384 + 3 * 512 == 206_360
    assert found.columns.fused_bytes == 40_960


@settings(max_examples=5, deadline=None)
@given(tokens=st.integers(1, 5000), hidden=st.integers(2, 9000), dtype=st.sampled_from(["bfloat16", "float16"]))
def test_bytes_follow_the_sizes(tokens: int, hidden: int, dtype: str) -> None:
    found = only(norm(tokens, hidden=hidden, dtype=dtype))
    assert found.columns.eager_bytes == tokens * (60 * hidden + 24) + 2 * hidden
    assert found.columns.operator_bytes == found.columns.fused_bytes == tokens * 8 * hidden + 2 * hidden


def test_rotary_takes_its_shapes() -> None:
    shapes = {"x": ("T", 32, 128), "cos": ("T", 1, 64), "sin": ("T", 1, 64)}
    call = OperatorCall(shapes=shapes, values={"rotary_dim": 128, "interleaved": False})
    found = only(operator_traffic("rotary", call, 2))
    half, angles, whole = 2 * 32 * 64 * 2, 2 * 64 * 2, 2 * 32 * 128 * 2
    assert found.columns.eager_bytes == 4 * (2 * half + angles) + 2 * 3 * half + 2 * whole
    assert found.columns.fused_bytes == 2 * whole + 2 * angles


def test_rows_are_gathered_and_a_product_stands_alone() -> None:
    call = OperatorCall(hidden=64, dtype="float32", shapes={"ids": ("T",), "weight": (64, 64)})
    found = only(operator_traffic("traffic_functions:gathered_product", call, 3))
    row, table = 64 * 4, 64 * 64 * 4
    by_name = {each.operator: (each.read_bytes, each.written_bytes, each.group) for each in found.operators}
    assert by_name["aten::embedding"] == (3 * row + 3 * 8, 3 * row, 0)
    assert by_name["aten::mm"] == (3 * row + table, 3 * row, 1)
    assert by_name["aten::add.Tensor"] == (3 * row + row, 3 * row, 2)
    assert found.groups == (3 * 4 + 2 * 3 * row, 6 * row + table, 7 * row)
    assert found.weight_bytes == table + row


def test_what_is_written_in_place_is_read_and_views_are_nothing() -> None:
    call = OperatorCall(hidden=10, dtype="float32")
    found = operator_traffic("traffic_functions:written_in_place", call, 4)
    whole = 4 * 10 * 4
    assert rows(found) == [
        ("aten::mul.Tensor", whole, whole), ("aten::add_.Tensor", 2 * whole, whole),
        ("aten::neg", whole // 2, whole // 2),
    ]  # fmt: skip
    assert only(found).groups == (2 * whole + whole // 2,)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Store]:
    return plan(configured(tmp_path_factory.mktemp("traffic")))


def test_a_model_is_counted_by_piece_and_site(planned: tuple[Record, Store]) -> None:
    found = record_traffic(*planned, StepSizes(4, 4, 20))
    opaque = "piecework::kv_update + piecework::attention"
    assert [(one.name, one.sites) for one in found.sites] == [
        ("piece 0", 1), (opaque, 3), ("piece 1", 2), ("piece 2", 1),
    ]  # fmt: skip
    assert found.sizes == {"tokens": 4, "rows": 4}
    matrices = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48) + 96 * 32  # q, o; k, v; gate, up, down; the head
    norms = (2 * 3 + 1) * 32
    assert found.weight_bytes == 2 * (matrices + norms) + 4 * 4  # and the frequencies of the rotary positions
    assert found.kv_written_bytes == 4 * 3 * 2 * 16 * 2
    assert found.kv_read_bytes == 4 * 20 * 3 * 2 * 16 * 2
    assert found.unknown == 0
    every = [each for one in found.sites for each in one.operators * one.sites]
    products = [each for each in every if each.operator == "aten::mm"]
    assert len(products) == 3 * 7 + 1
    assert (products[0].read_bytes, products[0].written_bytes) == (4 * 32 * 2 + 32 * 32 * 2, 4 * 32 * 2)


def test_a_model_fused_reads_and_writes_less_and_keeps_its_products(planned: tuple[Record, Store]) -> None:
    step = record_traffic(*planned, step_sizes(7)).step
    assert step.eager_bytes > step.operator_bytes > 0 and step.eager_bytes > step.fused_bytes > 0


def test_a_step_that_no_range_serves_is_refused(planned: tuple[Record, Store]) -> None:
    with pytest.raises(OptionError, match="no range of the program serves `65` tokens"):
        record_traffic(*planned, step_sizes(65))


def test_windows_bound_what_is_read() -> None:
    sites = [
        {"num_kv_heads": 2, "head_dim": 8, "sliding_window": 16},
        {"num_kv_heads": 2, "head_dim": 8, "sliding_window": 0},
    ]
    read, written = kv_bytes({"sites": sites, "dtype": "float16"}, StepSizes(3, 3, 100))
    row = 2 * 2 * 8 * 2
    assert (read, written) == (3 * (16 + 100) * row, 3 * 2 * row)


@pytest.mark.slow
def test_the_floor_of_eight_billion_weights(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    beside = model_traffic(
        str(tmp_path), step_sizes(1), dtype="auto", device="cpu",
        options=CompileOptions(compiler="eager").resolve(), store=MemoryStore(), observer=ignore, offline=True,
    )  # fmt: skip
    assert beside.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096) + 64 * 4
    assert bytes_text(beside.weight_bytes) == "15.01 GB"
    assert time_text(beside.weight_bytes / 3.35e12) == "4.48 ms"
    many = norm(256, 64)
    assert f"{many.step.difference_bytes / beside.weight_bytes:.1%}" == "23.3%"
    lines = traffic_lines(many, title=NORM, beside=beside, bandwidth=3.35e12)
    assert "  the difference is 23.3% of the weights that the model reads" in lines


def test_names_are_told_apart() -> None:
    assert is_operator(NORM) and is_operator("quant_fp8_static") and is_operator("a.b:c")
    assert not any(map(is_operator, ("models/llama", "meta-llama/Llama-3-8B", "C:/models", ".", "attention")))


@pytest.mark.parametrize(
    ("text", "rate"), [("3.35TB/s", 3.35e12), ("900 gb/s", 9e11), ("1e9", 1e9), ("12.5MB/s", 12.5e6)]
)
def test_bandwidths_are_read(text: str, rate: float) -> None:
    assert read_bandwidth(text, "cpu") == rate


@pytest.mark.parametrize("text", ["fast", "0", "1.2.3", "3 km/s", ""])
def test_bandwidths_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="is no bandwidth"):
        read_bandwidth(text, "cpu")


def test_a_bandwidth_is_measured() -> None:
    assert 1e8 < measure_bandwidth("cpu", 4 << 20) < 1e13


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(OptionError, match=r"`fused_add_rms_norm` has no argument `y`"):
        norm(1, shapes={"y": ("T", 4)})
    with pytest.raises(OptionError, match=r"needs a value for `rotary_dim`"):
        operator_traffic("rotary", OperatorCall(), 1)
    with pytest.raises(OptionError, match=r"there is no operator `nowhere:thing`"):
        operator_traffic("nowhere:thing", OperatorCall(), 1)
    with pytest.raises(OptionError, match=r"no argument of .* has the token count"):
        norm(1, shapes={"x": (1, 4096), "residual": (1, 4096)})
    with pytest.raises(OptionError, match=r"`8` tokens of `9` sequences are no step"):
        step_sizes(8, 9)
    with pytest.raises(OptionError, match=r"a context of `1` is shorter"):
        step_sizes(8, 2, 1)
    with pytest.raises(OptionError, match="is no number of sites"):
        norm(1, 0)
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="torch finds no CUDA device here"):
            operator_traffic("fused_add_rms_norm", OperatorCall(device="cuda"), 1)
    for wrong in ("x", "x=T,0", "=3", "x=T,a"):
        with pytest.raises(OptionError, match="is no shape"):
            read_shape(wrong)
    for wrong in ("x", "x=1+", "x=foo"):
        with pytest.raises(OptionError, match="is no value"):
            read_value(wrong)
