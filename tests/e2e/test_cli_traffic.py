"""The command `traffic`, as text and as JSON."""

from __future__ import annotations

from pathlib import Path

from e2e.command import llama_folder, piecework

NORM = ("traffic", "fused_add_rms_norm", "--store", "memory", "--hidden", "64", "--dtype", "float16")


def test_an_operator_is_told_by_line() -> None:
    done = piecework(*NORM, "--tokens", "2", "--sites", "3", "--bandwidth", "1GB/s")
    assert done.code == 0
    assert done.out.splitlines() == [
        "fused_add_rms_norm: tokens 2",
        "logical bytes of the traced graph: an explanatory model, not measured traffic",
        "",
        "fused_add_rms_norm, 3 sites",
        "  operator                 result          reads  writes  bytes  kernel",
        "  aten::_to_copy           float32[2, 64]    256     512    768  0",
        "  aten::_to_copy           float32[2, 64]    256     512    768  0",
        "  aten::add.Tensor         float32[2, 64]  1,024     512  1,536  0",
        "  aten::_to_copy           float16[2, 64]    512     256    768  0",
        "  aten::pow.Tensor_Scalar  float32[2, 64]    512     512  1,024  0",
        "  aten::mean.dim           float32[2, 1]     512       8    520  0",
        "  aten::add.Tensor         float32[2, 1]       8       8     16  0",
        "  aten::rsqrt              float32[2, 1]       8       8     16  0",
        "  aten::mul.Tensor         float32[2, 64]    520     512  1,032  0",
        "  aten::_to_copy           float16[2, 64]    512     256    768  0",
        "  aten::mul.Tensor         float16[2, 64]    384     256    640  0",
        "  11 operators that materialise: 7,856 bytes",
        "  eager with fused operators: 1,152 bytes",
        "  fused into 1 kernel: 1,152 bytes",
        "  ratio 6.8, difference 6,704 bytes a site",
        "",
        "in a step",
        "  operator by operator                          23,568 bytes    23.57 kB    23.57 µs",
        "  eager with fused operators                     3,456 bytes     3.46 kB     3.46 µs",
        "  fused                                          3,456 bytes     3.46 kB     3.46 µs",
        "  operator by operator less fused               20,112 bytes    20.11 kB    20.11 µs",
        "  weights read                                     384 bytes       384 B      384 ns",
        "  ratio 6.8",
        "  at 1.00 GB/s; weights, keys and values alone take 384 ns",
    ]


def test_a_model_and_an_operator_beside_it(tmp_path: Path) -> None:
    model = llama_folder(tmp_path)
    compiled = ("--store", "memory", "--compiler", "eager", "--max-num-batched-tokens", "64", "--json")
    found = piecework("traffic", model, "--tokens", "4", "--context", "9", *compiled).document
    assert [(one["name"], one["sites"]) for one in found["sites"]] == [
        ("piece 0", 1), ("piecework::kv_update + piecework::attention", 3), ("piece 1", 2), ("piece 2", 1),
    ]  # fmt: skip
    assert found["label"].endswith("not measured traffic")
    assert found["kv_read_bytes"] == 4 * 9 * 3 * 2 * 16 * 4
    assert found["step"]["eager_bytes"] > found["step"]["fused_bytes"] > found["weight_bytes"] > 0
    beside = piecework(*NORM, "--sites", "2", "--beside", model, *compiled[2:]).document
    frequencies = 4 * 4  # of the rotary positions: float32 in every dtype
    assert beside["beside"]["weight_bytes"] == (found["weight_bytes"] - frequencies) // 2 + frequencies
    assert beside["step"]["eager_bytes"] == 2 * (60 * 64 + 24 + 128)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    done = piecework("traffic", llama_folder(tmp_path), "--shape", "x=T,3", "--store", "memory")
    assert (done.code, done.err) == (
        2, "error: `--shape` is for an operator, and a model is asked for\nhint: leave it out\n",
    )  # fmt: skip
    done = piecework(*NORM, "--tokens", "0")
    assert done.code == 2
    assert "`0` tokens of `0` sequences are no step" in done.err
