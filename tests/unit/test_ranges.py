"""Ranges: what gets an artifact, and what is refused."""

from __future__ import annotations

import pytest

from piecework.errors import OptionError
from piecework.values.shapes import Range, format_box, parse_box, partition


def cut(*ranges: tuple[int, int], singles: tuple[int, ...] = (), maximum: int = 8192) -> list[str]:
    """Return the ranges of a partition as text."""
    return [str(item) for item in partition(ranges, singles, maximum)]


def test_size_one_and_single_sizes_stand_alone() -> None:
    assert cut((1, 64), (65, 8192)) == ["1", "2-64", "65-8192"]
    assert cut((1, 64), (65, 8192), singles=(8, 64, 65)) == ["1", "2-7", "8", "9-63", "64", "65", "66-8192"]


def test_ranges_are_clipped_to_the_maximum() -> None:
    assert cut((1, 64), (65, 8192), maximum=100) == ["1", "2-64", "65-100"]
    assert cut((1, 64), (65, 8192), maximum=64) == ["1", "2-64"]
    assert cut((1, 64), maximum=1) == ["1"]


def test_ranges_may_begin_above_one() -> None:
    assert cut((2, 8192)) == ["2-8192"]
    assert cut((16, 64), singles=(16,), maximum=64) == ["16", "17-64"]


@pytest.mark.parametrize(
    ("ranges", "singles", "message"),
    [
        (((1, 64), (66, 8192)), (), "ranges leave a gap or overlap at `65`"),
        (((1, 64), (64, 8192)), (), "ranges leave a gap or overlap at `65`"),
        (((1, 64),), (), "ranges end at `64`, below `max_num_batched_tokens=8192`"),
        (((2, 8192),), (1,), "single size `1` lies outside [2, 8192]"),
        (((1, 8192),), (9000,), "single size `9000` lies outside [1, 8192]"),
        (((0, 8192),), (), "range `(0, 8192)` is not an interval of sizes"),
    ],
)
def test_what_cannot_be_cut_is_refused(ranges: tuple, singles: tuple, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        cut(*ranges, singles=singles)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_boxes_are_written_and_read_back() -> None:
    box = {"s0": Range(2, 64), "s1": Range(1, 1)}
    assert format_box(box) == "s0=2-64,s1=1"
    assert parse_box("s0=2-64,s1=1") == box
    assert parse_box(format_box({})) == {}
