"""The split graph as Python: it runs, gives what the program gives, and makes one call a region."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from piecework.stages.graph_text import computation_graph
from piecework.store.notes import remove_notes
from piecework.store.protocol import PROGRAM
from piecework.values.record import Record, record_from

LAYERS = 32
library = torch.library.Library("graphtext", "DEF")
library.define("attention(Tensor query, Tensor key, str site) -> (Tensor, Tensor)")


@pw.split_op("graphtext::attention")
def attention(query: Tensor, key: Tensor, site: str) -> tuple[Tensor, Tensor]:
    """Mix two tensors; the site's name stands in the graph and changes nothing."""
    return query.softmax(-1) @ key.t() @ key, query.sum(-1, keepdim=True)


library.impl("attention", attention, "CPU")
torch.library.register_fake(
    "graphtext::attention",
    lambda query, key, site: (torch.empty_like(query), query.new_empty(query.shape[0], 1)),
    lib=library,
)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.site = f"layers.{index}"
        self.query, self.key, self.out = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        mixed, total = torch.ops.graphtext.attention(self.query(hidden), self.key(hidden), self.site)
        return hidden + torch.tanh(self.out(mixed)) + total


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Layer(index) for index in range(layers))

    def forward(self, ids: Tensor, *, scale: Tensor) -> dict[str, Any]:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"logits": hidden * scale, "rows": ids.shape[0], "table": self.words.weight, "scale": scale}


@pytest.fixture
def compiled() -> Iterator[tuple[Any, Model, Record, tuple[str, ...]]]:
    torch.manual_seed(0)
    model, store = Model(LAYERS).eval(), pw.MemoryStore()
    example = {"ids": torch.arange(6), "scale": torch.ones(8)}
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64)
    program = pw.compile(model, example, dynamic={"ids": {0: "tokens"}}, options=options, store=store)
    record = record_from(store.read_record(PROGRAM, program.key))
    yield program, model, record, tuple(store.read_blob(piece.text).decode() for piece in record.pieces)


def test_it_runs_and_gives_what_the_program_gives(compiled: Any) -> None:
    program, model, record, pieces = compiled
    space: dict[str, Any] = {}
    exec(computation_graph(program.key, record, pieces), space)
    weights = dict(model.state_dict(keep_vars=True))
    ids, scale = torch.tensor([3, 1, 4, 1, 5]), torch.randn(8)
    wanted = program(ids, scale=scale)
    names = [name for name, b in record.values.items() if b["kind"] in ("symbol", "input")]
    given = {"tokens": 5, **{n: {"ids": ids, "scale": scale}[record.values[n]["name"]] for n in names if n != "tokens"}}
    with torch.no_grad():
        got = space["computation_graph"](*(given[name] for name in names), weights)
    assert got["rows"] == wanted["rows"] == 5
    assert torch.equal(got["logits"], wanted["logits"])
    assert got["table"] is weights["words.weight"]
    assert got["scale"] is scale


def test_one_call_a_region(compiled: Any) -> None:
    program, _, record, pieces = compiled
    tree = ast.parse(computation_graph(program.key, record, pieces))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    main = functions.pop("computation_graph")
    calls = [node.func.id for node in ast.walk(main) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert len(calls) == len(record.regions) == 2 * LAYERS + 1
    assert set(calls) == set(functions) == {"piece_0", "piece_1", "piece_2", "opaque_0"}
    assert [call.partition("_")[0] for call in calls] == ["piece", "opaque"] * LAYERS + ["piece"]


def test_sites_keep_their_names(compiled: Any) -> None:
    program, _, record, pieces = compiled
    text = computation_graph(program.key, record, pieces)
    assert all(text.count(f"'layers.{index}')") == 1 for index in range(LAYERS))


def test_a_cold_start_leaves_it_beside_the_record_and_a_warm_one_nothing(tmp_path: Path) -> None:
    model, seen = Model(2).eval(), pw.events.Recorder()
    example, options = {"ids": torch.arange(6), "scale": torch.ones(8)}, pw.CompileOptions(compiler="eager")
    store = pw.DiskStore(tmp_path / "store")
    for _ in range(2):
        program = pw.compile(
            model, example, dynamic={"ids": {0: "tokens"}}, options=options, store=store, observer=seen
        )
    assert [miss.reason for miss in seen.of(pw.events.RecordMiss)] == ["nothing is stored under these factors"]
    (written,) = seen.of(pw.events.GraphWritten)
    record = next((tmp_path / "store").rglob(f"{program.key}.record"))
    assert Path(written.path) == record.with_name(program.key) / "computation_graph.py"
    assert "def computation_graph(tokens, x0, x1, weights):" in Path(written.path).read_text()
    assert store.list_records(PROGRAM) == [program.key]
    remove_notes(store.path, PROGRAM, program.key)
    assert not record.with_name(program.key).exists()


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    options = pw.CompileOptions(compiler="eager", debug_folder=str(tmp_path / "made" / "here"))
    example = {"ids": torch.arange(6), "scale": torch.ones(8)}
    pw.compile(Model(1), example, dynamic={"ids": {0: "tokens"}}, options=options, store=pw.MemoryStore())
    compile((tmp_path / "made" / "here" / "computation_graph.py").read_text(), "graph", "exec")
