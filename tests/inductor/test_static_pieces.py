"""Pieces bound to one size: the same results as ever, whatever is called in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from piecework.seam.code import LoadedCode
from piecework.seam.loader import load
from piecework.values.artifact import TEXT, Artifact
from toy_pieces import FIRST, LAST, MIDDLE, inputs_for

Artifacts = dict[tuple[str, int], Artifact]
KernelWriter = Callable[[Artifact], Callable[[str], Path]]


def code(artifacts: Artifacts, write_kernels: KernelWriter, name: str) -> LoadedCode:
    artifact = artifacts[name, 2]
    loaded = load(artifact, kernel_path=write_kernels(artifact))
    assert isinstance(loaded, LoadedCode)
    return loaded


def test_many_sizes_in_turn_over_two_sites(artifacts: Artifacts, write_kernels: KernelWriter) -> None:
    loaded = code(artifacts, write_kernels, "middle")
    weights = [inputs_for(MIDDLE, {"s0": 2}, seed=site)[1] for site in (1, 2)]
    plain = [loaded.bind(own) for own in weights]
    static = {
        (site, size): loaded.bind_static(weights[site], {"s0": size}, fresh=()) for site in (0, 1) for size in (2, 3, 9)
    }
    for step, (site, size) in enumerate([(0, 2), (1, 2), (0, 9), (1, 3), (0, 2), (1, 9), (0, 3), (0, 3)]):
        called = inputs_for(MIDDLE, {"s0": size}, seed=step)[0]
        bound = static[site, size]
        assert bound is not None
        expected, results = plain[site](*called), bound.call(*called)
        for index in (0, 1, 2, 4):
            assert torch.equal(results[index], expected[index]), (step, index)
            assert results[index].stride() == expected[index].stride()


def test_fresh_outputs_outlive_the_next_call(artifacts: Artifacts, write_kernels: KernelWriter) -> None:
    bound = code(artifacts, write_kernels, "middle").bind_static(
        inputs_for(MIDDLE, {"s0": 4})[1], {"s0": 4}, fresh=(0, 4)
    )
    assert bound is not None
    assert sorted(bound.outputs) == [1, 2, 3]
    first = bound.call(*inputs_for(MIDDLE, {"s0": 4}, seed=1)[0])
    kept = {index: first[index].clone() for index in (0, 4)}
    second = bound.call(*inputs_for(MIDDLE, {"s0": 4}, seed=2)[0])
    for index, copy in kept.items():
        assert torch.equal(first[index], copy)
        assert not torch.equal(second[index], copy)
    for index in (1, 2, 3):
        assert first[index].data_ptr() == second[index].data_ptr() == bound.outputs[index].data_ptr()


def test_outputs_of_two_sites_never_share_memory(artifacts: Artifacts, write_kernels: KernelWriter) -> None:
    loaded = code(artifacts, write_kernels, "middle")
    sites = [loaded.bind_static(inputs_for(MIDDLE, {"s0": 3})[1], {"s0": 3}, fresh=()) for _ in range(2)]
    spans = []
    for bound in sites:
        assert bound is not None
        for tensor in bound.outputs.values():
            storage = tensor.untyped_storage()
            spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    unique = sorted(set(spans))
    assert len(unique) == 2 * len(set(spans[: len(spans) // 2]))
    assert all(end <= start for (_, end), (start, _) in zip(unique, unique[1:], strict=False))


def test_sites_in_a_row_are_linked_by_their_outputs(artifacts: Artifacts, write_kernels: KernelWriter) -> None:
    """The first and the last piece with a copy between them, as a program runs them."""
    first, last = (code(artifacts, write_kernels, name) for name in ("first", "last"))
    own = [inputs_for(text, {"s0": 5})[1] for text in (FIRST, LAST)]
    one = first.bind_static(own[0], {"s0": 5}, fresh=())
    assert one is not None
    two = last.bind_static(own[1], {"s0": 5}, fresh=(0,), given={"x0": one.outputs[3], "x1": one.outputs[4]})
    assert two is not None
    plain = first.bind(own[0]), last.bind(own[1])
    for seed in range(3):
        called = inputs_for(FIRST, {"s0": 5}, seed=seed)[0]
        query, _, _, out, residual, *_ = one.call(*called)
        out.copy_(query)
        (result,) = two.call(5, out, residual)
        query, _, _, out, residual, *_ = plain[0](*called)
        assert torch.equal(result, plain[1](5, out.copy_(query), residual)[0])


def test_text_that_runs_as_it_is_has_no_static_form() -> None:
    loaded = load(Artifact(TEXT, MIDDLE), kernel_path=Path)
    assert loaded.bind_static(inputs_for(MIDDLE, {"s0": 2})[1], {"s0": 2}, fresh=()) is None
