"""`custom_ops`: exactly one base mode, single operators on top, and what enters keys."""

from __future__ import annotations

import subprocess
import sys

import pytest

from piecework.errors import OptionError
from piecework.ops.choice import choose
from piecework.options import CompileOptions


@pytest.mark.parametrize(
    ("compiler", "given", "complete"),
    [
        ("inductor", (), ("none",)),
        (None, (), ("none",)),
        ("eager", (), ("all",)),
        ("aot_eager", ("-rotary",), ("all", "-rotary")),
        ("inductor", ("+rms_norm",), ("none", "+rms_norm")),
        ("inductor", ("all",), ("all",)),
        ("eager", ("none", "+rms_norm"), ("none", "+rms_norm")),
    ],
)
def test_the_base_mode_follows_the_compiler(
    compiler: str | None, given: tuple[str, ...], complete: tuple[str, ...]
) -> None:
    assert CompileOptions(compiler=compiler, custom_ops=given).resolve().custom_ops == complete


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("all", "none"), "holds the base modes `all` and `none`"),
        (("none", "none"), "holds the base modes `none` and `none`"),
        (("+rms_norm", "-rms_norm"), r"holds `\+rms_norm` and `-rms_norm`"),
        (("rms_norm",), "holds `rms_norm`"),
        (("+",), r"holds `\+`"),
        ("+rms_norm", "`custom_ops` is"),
    ],
)
def test_what_contradicts_itself_is_an_error(given: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CompileOptions(custom_ops=given)  # type: ignore[arg-type]


def test_an_unknown_operator_is_an_error_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"operator `rms_nrom` is unknown[^?]*did you mean `rms_norm`\?"):
        choose(("none", "+rms_nrom"), "cpu")
    with pytest.raises(OptionError, match="holds 0 of the base modes `all` and `none`"):
        choose(("+rms_norm",), "cpu")


def test_what_is_on_and_what_implements_it_enter_the_key() -> None:
    on, off, named = choose(("all",), "cpu"), choose(("none",), "cpu"), choose(("none", "+rotary_kv_update"), "cpu")
    assert on["rms_norm"].is_on and not off["rms_norm"].is_on
    assert on["rms_norm"].as_factor() == off["rms_norm"].as_factor().replace("off", "on")
    # An operator that is cut at is on where it is named alone.
    assert not on["rotary_kv_update"].is_on and named["rotary_kv_update"].is_on
    # What no compiler can write stays, unless it is taken away by name.
    assert [one.name for one in off["quant_fp8"].candidates] == ["columns"]
    assert choose(("none", "-quant_fp8"), "cpu")["quant_fp8"].candidates == ()
    state, _, listed = on["quant_fp8"].as_factor().partition(": ")
    assert state == "on" and [each.split()[0] for each in listed.split(", ")] == ["columns", "reference"]


def test_an_edited_implementation_is_another_factor() -> None:
    script = """
from piecework import ops
from piecework.ops.choice import choose
ops.implement("rms_norm", "mine", {"rms_norm": lambda x, weight, epsilon, variance_size=None: x * 2 + CONSTANT})
found = choose(("all",), "cpu")["rms_norm"]
print(found.as_factor())
print(found.pick("rms_norm", {}).name)
"""
    seen = [
        subprocess.run(
            [sys.executable, "-c", script.replace("CONSTANT", constant)], capture_output=True, text=True, check=True
        ).stdout.split("\n")
        for constant in ("1", "2", "1")
    ]
    assert seen[0] == seen[2] and seen[0][0] != seen[1][0]
    assert seen[0][0].startswith("on: mine ") and seen[0][1] == "mine"
