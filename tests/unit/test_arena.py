"""Splitting a stripped text into what is evaluated once and what runs at every call, on plain lists for buffers."""

from __future__ import annotations

from typing import Any

from piecework.seam.arena import StaticCode, split_static

TEXT = """\
add = torch.add
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
float32 = torch.float32
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor


def call(s0, x0, x1):
    buf0 = empty_strided_cpu((s0, 16), (16, 1), float32)
    add(reinterpret_tensor(x0, (s0, 16), (16, 1), 0), w0, buf0)
    buf1 = empty_strided_cpu((s0, 4), (4, 1), float32)
    add(buf0, 2 * s0, buf1)
    del buf0
    buf2 = empty_strided_cpu((s0, 8), (8, 1), float32)
    add(reinterpret_tensor(buf1, (s0, 4), (4, 1), 0), x1, buf2)
    buf3 = buf2
    del buf2
    return (buf1, reinterpret_tensor(buf3, (s0, 2), (2, 1), 0), x1)
"""


class Bench:
    """Runs the parts of a split with functions that note what they are asked."""

    def __init__(self, split: StaticCode, **more: object) -> None:
        self.log: list[str] = []
        self.names: dict[str, Any] = {
            "empty_strided_cpu": self._allocate,
            "reinterpret_tensor": self._view,
            "add": lambda *values: self.log.append(f"add {values}"),
            "float32": "f32",
            "w0": "weight",
            **more,
        }
        exec(split.inside, self.names)
        self.inside = self.taken()
        exec(split.once, self.names)
        self.once = self.taken()
        exec(split.hot, self.names)

    def _allocate(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> str:
        self.log.append(f"new {size}")
        return f"buffer{size}"

    def _view(self, base: str, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> str:
        self.log.append(f"view {base}")
        return f"{base}{size}"

    def taken(self) -> list[str]:
        log, self.log = self.log, []
        return log


def split(fresh: set[int], given: tuple[str, ...] = ()) -> StaticCode:
    found = split_static(TEXT, ("s0",), fresh, given)
    assert found is not None
    return found


def test_a_call_at_a_known_size_runs_kernels_and_views_of_its_inputs_alone() -> None:
    bench = Bench(split(set()), s0=3)
    assert bench.inside == ["new (3, 16)"]
    assert bench.once == ["new (3, 4)", "new (3, 8)", "view buffer(3, 4)", "view buffer(3, 8)"]
    result = bench.names["call"](3, "x", "y")
    assert bench.taken() == [
        "view x",
        "add ('x(3, 16)', 'weight', 'buffer(3, 16)')",
        "add ('buffer(3, 16)', 6, 'buffer(3, 4)')",
        "add ('buffer(3, 4)(3, 4)', 'y', 'buffer(3, 8)')",
    ]
    assert result == ("buffer(3, 4)", "buffer(3, 8)(3, 2)", "y")


def test_outputs_asked_for_fresh_are_allocated_at_every_call() -> None:
    bench = Bench(split({1}), s0=3)
    assert bench.once == ["new (3, 4)", "view buffer(3, 4)"]
    bench.names["call"](3, "x", "y")
    bench.names["call"](3, "x", "y")
    assert [line for line in bench.taken() if line.startswith("new")] == ["new (3, 8)"] * 2


def test_outputs_that_stay_are_named_and_others_are_not() -> None:
    assert split(set()).outputs == ("buf1", "reinterpret_tensor(buf3, (s0, 2), (2, 1), 0)", "")
    assert split({0}).outputs == ("", "reinterpret_tensor(buf3, (s0, 2), (2, 1), 0)", "")


def test_activations_that_stay_the_same_are_viewed_once() -> None:
    bench = Bench(split(set(), ("x0",)), s0=3, x0="given")
    assert "view given" in bench.once
    bench.names["call"](3, "ignored", "y")
    assert "view ignored" not in bench.taken()


def test_sizes_that_buffers_need_are_there_before_them() -> None:
    text = (
        "def call(s0):\n    n = 2 * s0\n    buf0 = empty_strided_cpu((n, 1), (1, 1), float32)\n"
        "    add(buf0, n)\n    return ()\n"
    )
    found = split_static(text, ("s0",), set())
    assert found is not None
    bench = Bench(found, s0=5)
    assert bench.inside == ["new (10, 1)"]
    bench.names["call"](5)
    assert bench.taken() == ["add ('buffer(10, 1)', 10)"]


def test_what_an_operator_returns_is_never_taken_for_static() -> None:
    text = (
        "def call(s0):\n    buf0 = empty_strided_cpu((s0, 1), (1, 1), float32)\n    u0 = buf0.item()\n"
        "    buf1 = empty_strided_cpu((u0, 1), (1, 1), float32)\n    buf2 = add(buf0)\n    return (buf1, buf2)\n"
    )
    found = split_static(text, ("s0",), set())
    assert found is not None
    assert found.outputs == ("", "")
    assert "u0" in found.hot.co_consts[0].co_varnames
    assert "buf1" in found.hot.co_consts[0].co_varnames


def test_a_name_with_two_meanings_is_not_split() -> None:
    text = "def call(s0):\n    a = empty_strided_cpu((s0,), (1,), f)\n    a = add(a)\n    return (a,)\n"
    assert split_static(text, ("s0",), set()) is None
