"""`piecework bench`: two settings in one run, readings in turn, medians of what is stated."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.command import llama_folder, piecework
from piecework.diagnostics.bench import Measure, Side, _result

FLAGS = ("--compiler", "eager", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


def test_medians_and_ratios_are_of_the_readings() -> None:
    sides = [Side("this", {}), Side("versus", {"mode": "none"})]
    values = (("this", 2), ("versus", 3), ("this", 1), ("versus", 9), ("this", 4), ("versus", 6))
    readings = [{"side": name, "value": value} for name, value in values]
    found = _result(Measure("startup", "m"), sides, readings)
    assert found["table"]["this"] == {"median": 2, "best": 1, "readings": 3}
    assert found["table"]["versus"] == {"median": 6, "best": 3, "readings": 3}
    assert found["ratios"] == {"versus/this": {"median": 3.0, "best": 3.0}}
    faster = _result(Measure("decode", "m"), sides, readings)
    assert faster["table"]["this"]["best"] == 4


def test_two_settings_are_read_in_turn(model: Path) -> None:
    more = ("--versus", '{"mode": "none"}', "--repetitions", "2", "--calls", "2", "--json")
    found = piecework("bench", "dispatch", model, *FLAGS, *more).document
    assert [reading["side"] for reading in found["readings"]] == ["this", "versus", "versus", "this"]
    assert found["sides"]["versus"]["options"] == {**found["sides"]["this"]["options"], "mode": "none"}
    assert found["unit"] == "us"
    assert "2 timed after 1 thrown away in each" in found["how"]
    assert all(reading["value"] >= reading["least_us"] > 0 for reading in found["readings"])
    # The stores were filled before: what is read is a warm start.
    assert all("trace_s" not in reading["phases"] for reading in found["readings"])


def test_what_cannot_be_measured_is_refused(model: Path) -> None:
    done = piecework("bench", "startup", model, *FLAGS, "--versus-commit", "no-such-commit")
    assert (done.code, "there is no commit `no-such-commit`" in done.err) == (2, True)
    assert piecework("bench", "decode", model, "--tokens", "1").code == 2
    assert piecework("bench", "startup", model, "--repetitions", "0").code == 2
    failed = piecework("bench", "startup", model / "none", *FLAGS)
    assert failed.code == 1
    assert "a reading of `this` failed" in failed.err
