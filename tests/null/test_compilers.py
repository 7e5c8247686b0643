"""The compilers that need no C++ compiler: eager, aot_eager, and a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from piecework.compilers import select_compiler
from piecework.errors import CompileError, Incompatible, OptionError
from piecework.seam.loader import load
from piecework.values.artifact import OBJECT, TEXT, Artifact
from piecework.values.shapes import Range
from toy_pieces import MIDDLE, PIECES, UNINITIALISED, inputs_for, write_piece


def run(artifact: Artifact, text: str, size: int) -> tuple[Any, ...]:
    def no_kernels(digest: str) -> Any:
        raise AssertionError("has no kernels")

    called, weights = inputs_for(text, {"s0": size})
    return load(artifact, kernel_path=no_kernels).bind(weights)(*called)


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize(("size", "at"), [(Range(2, 64), 5), (Range(1, 1), 1)])
def test_the_functional_trace_gives_what_the_text_gives(name: str, size: Range, at: int) -> None:
    text = PIECES[name]
    artifact = select_compiler("aot_eager").compile(text, {"s0": size})
    assert artifact.kind == TEXT
    assert "torch.ops.aten." in artifact.text
    assert "torch._C" not in artifact.text
    wanted = run(select_compiler("eager").compile(text, {"s0": size}), text, at)
    results = run(artifact, text, at)
    for index, (result, value) in enumerate(zip(results, wanted, strict=True)):
        assert result.shape == value.shape
        assert index in UNINITIALISED[name] or torch.allclose(result, value, rtol=1e-5, atol=1e-6)


def test_a_functional_trace_keeps_writes_to_inputs() -> None:
    text = write_piece({"x0": "float32[8] cpu"}, "v0 = x0.add_(1)", "v1 = operator.mul(v0, 2)", "return (v1,)")
    artifact = select_compiler("aot_eager").compile(text, {})
    assert "copy_" in artifact.text
    (result,) = run(artifact, text, 1)
    ((value,), _) = inputs_for(text, {})
    assert torch.equal(result, (value + 1) * 2)  # type: ignore[operator]


def test_what_a_functional_trace_cannot_say_is_refused() -> None:
    text = write_piece(
        {"x0": "float32[4, 8] cpu"}, "v0 = x0.transpose_(0, 1)", "v1 = operator.mul(v0, 2)", "return (v1,)"
    )
    with pytest.raises(CompileError, match="its functional graph alone: it writes to inputs after the graph"):
        select_compiler("aot_eager").compile(text, {})


def test_a_function_of_the_users_is_given_the_graph_and_fakes() -> None:
    seen: list[tuple[list[str], list[Any]]] = []

    def mine(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(([node.name for node in graph.graph.nodes if node.op == "placeholder"], list(inputs)))
        return graph.forward

    artifact = select_compiler(mine).compile(MIDDLE, {"s0": Range(2, 64)})
    assert artifact.kind == OBJECT
    (names, inputs) = seen[0]
    assert names[:3] == ["s0", "x0", "x1"]
    assert isinstance(inputs[0], torch.SymInt)
    assert type(inputs[1]).__name__ == "FakeTensor"
    wanted = run(select_compiler("eager").compile(MIDDLE, {}), MIDDLE, 3)
    assert torch.equal(run(artifact, MIDDLE, 3)[4], wanted[4])


def test_a_boxed_function_is_called_boxed() -> None:
    def mine(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def boxed(values: list[Any]) -> Any:
            assert isinstance(values, list)
            return graph.forward(*values)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    artifact = select_compiler(mine).compile(MIDDLE, {"s0": Range(2, 64)})
    assert run(artifact, MIDDLE, 3)[4].shape == (3, 16)


def test_versions_of_functions_never_repeat() -> None:
    def mine(graph: Any, inputs: Any) -> Any:
        return graph

    assert "mine" in select_compiler(mine).version
    assert select_compiler(mine).version != select_compiler(mine).version


def test_an_object_of_another_process_is_refused() -> None:
    with pytest.raises(Incompatible, match="made by a compile function in another process"):
        run(Artifact(OBJECT, "", {}, (), {"object": "elsewhere.0", "weights": []}), MIDDLE, 2)


def test_a_function_that_fails_is_a_compile_error() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such device")

    with pytest.raises(CompileError, match="the compile function failed for range `s0=2-4`: `ValueError: no such dev"):
        select_compiler(broken).compile(MIDDLE, {"s0": Range(2, 4)})
    with pytest.raises(CompileError, match="the compile function returned a `NoneType`"):
        select_compiler(lambda graph, inputs: None).compile(MIDDLE, {"s0": Range(2, 4)})


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(OptionError) as caught:
        select_compiler("inducter")
    assert str(caught.value) == (
        "compiler `inducter` is unknown\n"
        "hint: did you mean `inductor`? known are eager, aot_eager, inductor, or a function"
    )
