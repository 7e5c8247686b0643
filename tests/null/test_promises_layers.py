"""More layers, as many artifacts."""

from __future__ import annotations

import torch
from benchmarks.toy_llama import OPERATOR, ToyLlama, ToyShape, fill_weights

import piecework as pw
from piecework.events import ArtifactCompiled, ArtifactReused, Recorder, SplitDone

OPTIONS = pw.CompileOptions(compiler="eager", split_ops=(OPERATOR,), verify=False)
TOKENS = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}


def start(layers: int, store: pw.MemoryStore) -> Recorder:
    torch.manual_seed(0)
    model, seen, ids = ToyLlama(ToyShape(layers=layers)), Recorder(), torch.arange(5)
    fill_weights(model)
    program = pw.compile(model, (ids, ids), dynamic=TOKENS, options=OPTIONS, store=store, observer=seen)
    with torch.no_grad():
        assert torch.equal(program(ids, ids), model(ids, ids))
    return seen


def test_128_layers_need_what_8_need() -> None:
    store = pw.MemoryStore()
    few, many = start(8, store), start(128, store)
    # Each is traced for one token and for more: what is contiguous differs.
    for eight, hundred in zip(few.of(SplitDone), many.of(SplitDone), strict=True):
        assert (eight.regions, eight.opaque, eight.sites) == (17, 8, 9)
        assert (hundred.regions, hundred.opaque, hundred.sites) == (257, 128, 129)
        assert eight.distinct == hundred.distinct == 3
        assert eight.artifacts == hundred.artifacts
    assert len(few.of(ArtifactCompiled)) == 9
    assert many.of(ArtifactCompiled) == []
    assert {e.key for e in many.of(ArtifactReused)} == {e.key for e in few.of(ArtifactCompiled)}
