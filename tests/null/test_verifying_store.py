"""Audits: what a store holds is made again and compared; the store itself is neither used nor changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.api.recompile import recompile
from piecework.events import ArtifactCompiled, Recorder
from toy_box import snapshot


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).eval()


def start(store: Any, compiler: str = "eager", observer: Any = None) -> pw.Program:
    options = pw.CompileOptions(compiler=compiler, max_num_batched_tokens=64, ranges=((1, 64),))
    example = (torch.ones(3, 8),)
    return pw.compile(
        make(), example, dynamic={"input": {0: "tokens"}}, options=options, store=store, observer=observer
    )


def planted(store: pw.DiskStore) -> str:
    """Put another text in an artifact, as whoever can write and knows the format could; return its key."""
    key = store.list_records("artifact")[0]
    record = store.read_record("artifact", key)
    text = store.read_blob(record["text"]).decode().replace("silu", "relu")
    store.write_record("artifact", key, {**record, "text": store.write_blob(text.encode())})
    return key


def test_a_good_store_holds_what_is_made_now(tmp_path: Path) -> None:
    start(pw.DiskStore(tmp_path))
    before = snapshot(tmp_path)
    seen = Recorder()
    audit = pw.VerifyingStore(pw.DiskStore(tmp_path, read_only=True))
    program = start(audit, observer=seen)
    inputs = torch.randn(5, 8)
    with torch.no_grad():
        assert torch.equal(program(inputs), make()(inputs))
    assert seen.of(ArtifactCompiled)
    assert audit.differences == []
    assert audit.compared > 1 and audit.unknown == 0
    assert snapshot(tmp_path) == before


def test_an_artifact_that_was_exchanged_is_named(tmp_path: Path) -> None:
    store = pw.DiskStore(tmp_path)
    start(store)
    key = planted(store)
    audit = pw.VerifyingStore(pw.DiskStore(tmp_path))
    start(audit)
    assert [(found.kind, found.key) for found in audit.differences] == [("artifact", key)]
    assert str(audit.differences[0]).startswith(f"artifact `{key}`: text: ")


def test_a_program_that_was_exchanged_is_named(tmp_path: Path) -> None:
    store = pw.DiskStore(tmp_path)
    key = start(store).key
    record = store.read_record("program", key)
    other = {**record, "split_ops": ["toybox::other"]}
    store.delete_record("program", key)
    store.write_record("program", f"{key.partition('.')[0]}.{'0' * 64}", other)
    audit = pw.VerifyingStore(pw.DiskStore(tmp_path))
    start(audit)
    assert [found.kind for found in audit.differences] == ["program"]
    assert audit.differences[0].what == ("split_ops: `['toybox::other']` / `[]`",)


def test_what_the_store_does_not_have_is_counted(tmp_path: Path) -> None:
    audit = pw.VerifyingStore(pw.DiskStore(tmp_path))
    start(audit)
    assert audit.compared == 0 and audit.unknown > 1 and audit.differences == []


def test_artifacts_are_compiled_again_without_a_model(tmp_path: Path) -> None:
    store = pw.DiskStore(tmp_path)
    start(store)
    start(store, "aot_eager")
    found = recompile(pw.DiskStore(tmp_path, read_only=True))
    assert (found.compared, found.differences, found.skipped) == (len(store.list_records("artifact")), (), {})
    key = planted(store)
    found = recompile(pw.DiskStore(tmp_path, read_only=True))
    assert [each.key for each in found.differences] == [key]


def test_what_cannot_be_made_here_is_skipped_with_the_reason(tmp_path: Path) -> None:
    store = pw.DiskStore(tmp_path)
    start(store)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = recompile(store)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.compared == 0 and len(found.skipped) == len(store.list_records("artifact"))
    reason = "environment.modes.float32_matmul_precision: `None` / `high`"
    assert set(found.skipped.values()) == {reason}


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_inductor_makes_is_made_again_to_the_byte(tmp_path: Path, is_broken: bool) -> None:
    store = pw.DiskStore(tmp_path)
    start(store, "inductor")
    if is_broken:
        record = store.read_record("artifact", store.list_records("artifact")[0])
        assert record["kind"] == "inductor"
        store.write_record(
            "artifact", store.list_records("artifact")[0],
            {**record, "kernels": {name: store.write_blob(b"not a library") for name in record["kernels"]}},
        )  # fmt: skip
    found = recompile(store)
    assert found.compared == len(store.list_records("artifact"))
    assert len(found.differences) == int(is_broken)
