"""Bisect: a fault planted anywhere is found, with its stage, its site, its call and what reproduces it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import SPLIT
from piecework.diagnostics.bisect import AOT, BIND, CAPTURE, COMPILE, EQUAL, TRACE, Finding, bisect
from piecework.diagnostics.inside import CALL, REPLAY, STORED
from piecework.errors import OptionError
from piecework.seam.dry import DryDevice
from piecework.seam.loader import load
from piecework.stages.find import read_program
from piecework.store.protocol import ARTIFACT, PROGRAM
from piecework.values.artifact import TEXT, Artifact
from piecework.values.digest import digest_text
from planted_compilers import PlantedCompiler, calls_of, with_altered_call, with_other_layout
from toy_pieces import inputs_for

SIZE = 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))) + x


class Deep(nn.Module):
    """Six sites of four distinct pieces: before, three alike, another width, after."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(16, 4)
        self.alike = nn.ModuleList(Block(8) for _ in range(3))
        self.wider = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.ops.cases.fresh(torch.tanh(self.first(x)))
        for block in self.alike:
            h = torch.ops.cases.fresh(torch.sigmoid(block(h)))
        h = torch.ops.cases.fresh(torch.tanh(self.wider(h)) * 0.5)
        return self.last(h * h) + 1


def inputs() -> tuple[Tensor]:
    return (torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1)),)


def find(model: nn.Module, compiler: Any, store: Any = None, given: Any = None, **more: Any) -> Finding:
    options = pw.CompileOptions(
        compiler="eager", split_ops=SPLIT, verify=False, ranges=((1, 16),), max_num_batched_tokens=16
    )
    return bisect(
        model, given or inputs(), dynamic={"x": {0: "tokens"}}, options=options, store=store or pw.MemoryStore(),
        compiler=compiler, **more,
    )  # fmt: skip


def plan_of(model: nn.Module) -> tuple[list[str], list[int]]:
    """Return the model's pieces, and the piece of each region (-1 where it is none)."""
    store = pw.MemoryStore()
    find(model, PlantedCompiler(lambda text: text), store)
    record = read_program(store.list_records(PROGRAM)[0], store)
    return [store.read_blob(p.text).decode() for p in record.pieces], [region["piece"] for region in record.regions]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = find(Deep(), PlantedCompiler(lambda text: text))
    assert (found.stage, found.is_equal, found.skipped) == (EQUAL, True, {})
    assert found.calls == {"aot": 6, "compiled": 6, "captured": 6}
    assert found.result is not None and not found.result.is_fault


FAULTS: dict[str, Callable[[str, int], str]] = {
    "stored": with_altered_call,
    "off by one percent": with_altered_call,
    "strides": with_other_layout,
}


def shows(text: str, line: int) -> bool:
    """Tell whether another layout of one value leaves the piece: products that take it in give the usual one again."""
    called, weights = inputs_for(text, {"s0": SIZE})
    results = [
        load(Artifact(TEXT, each), kernel_path=Path).bind(weights)(*called)
        for each in (text, with_other_layout(text, line))
    ]
    return [one.stride() for one in results[0]] != [one.stride() for one in results[1]]


def plant_and_find(seed: int, folder: Path) -> None:
    draw, model = random.Random(seed), Deep()
    pieces, regions = plan_of(model)
    kind = draw.choice(list(FAULTS))
    number = draw.randrange(len(pieces))
    lines = [line for line in calls_of(pieces[number]) if kind != "strides" or shows(pieces[number], line)]
    line = draw.choice(lines)
    value = calls_of(pieces[number])[line]

    def fault(text: str) -> str:
        # The compiler is wrong in one call of one piece, whatever the piece returns.
        same = text.strip().splitlines()[:-1] == pieces[number].splitlines()[:-1]
        return FAULTS[kind](text, line) if same else text

    store = pw.MemoryStore()
    if kind == "stored":
        right = PlantedCompiler(lambda text: text)
        find(model, right, store)
        alter_stored(store, pieces[number], fault)
        found = find(model, right, store, folder=folder)
    else:
        found = find(model, PlantedCompiler(fault), store, folder=folder)
    what = (seed, kind, number, line, value, found)
    assert (found.stage, found.piece, found.region) == (COMPILE, number, regions.index(number)), what
    assert found.inside is not None and found.difference is not None and found.difference.is_fault, what
    assert all(count <= 2 * 6 for count in found.calls.values()), what
    if kind == "stored":
        assert found.inside.origin == STORED and found.inside.value == found.tensor, what
    else:
        assert (found.inside.origin, found.inside.value) == (CALL, value), what
        assert found.inside.line == pieces[number].splitlines()[line].strip(), what
    wanted = "strides" if kind == "strides" else "is off by"
    assert wanted in found.difference.fault, what


def alter_stored(store: Any, piece: str, fault: Callable[[str], str]) -> None:
    """Change the text of every artifact of one piece where it lies."""
    for key in store.list_records(ARTIFACT):
        record = dict(store.read_record(ARTIFACT, key))
        if record["factors"]["piece"] == digest_text(piece):
            text = store.read_blob(record["text"]).decode()
            store.write_record(ARTIFACT, key, {**record, "text": store.write_blob(fault(text).encode())})


@pytest.mark.parametrize("seed", (0, 1, 2, 5, 6))  # in the last two an opaque operator refuses what a wrong piece gave
def test_a_planted_fault_is_found(seed: int, tmp_path: Path) -> None:
    plant_and_find(seed, tmp_path / "repro")


@pytest.mark.soak
@pytest.mark.parametrize("seed", (3, 4, *range(7, 30)))
def test_a_planted_fault_is_found_wherever_it_is(seed: int, tmp_path: Path) -> None:
    plant_and_find(seed, tmp_path / "repro")


def test_the_folder_reproduces_the_fault_alone(tmp_path: Path) -> None:
    model = Deep()
    pieces, _ = plan_of(model)
    line = list(calls_of(pieces[1]))[0]
    wrong = PlantedCompiler(lambda text: with_altered_call(text, line) if "gelu" in text else text)
    found = find(model, wrong, folder=tmp_path / "repro")
    assert found.folder == tmp_path / "repro"
    done = subprocess.run([sys.executable, str(tmp_path / "repro" / "repro.py")], capture_output=True, text=True)
    assert found.difference is not None
    assert (done.returncode, done.stderr) == (1, "")
    assert found.difference.fault in done.stdout.splitlines()


class WrongGraph:
    """A graph whose replay does not leave what was recorded: another value, rows of a former step, or nothing."""

    def __init__(self, graph: Any, kind: str) -> None:
        self._graph, self._kind = graph, kind

    def replay(self) -> None:
        if self._kind == "not replayed":
            return
        self._graph.replay()
        result = next(home for home in self._graph._entries[-1].homes if home is not None)
        if self._kind == "another value":
            result.view(-1)[0] += 1.0
        else:
            result.copy_(result.roll(1, 0))

    def reset(self) -> None:
        self._graph.reset()


class WrongDevice(DryDevice):
    """A device one of whose graphs is wrong, counted from the first that `made` counts."""

    def __init__(self, made: list[int], wrong: int, kind: str) -> None:
        super().__init__(by_call=True)
        self._made, self._wrong, self._kind = made, wrong, kind

    def end(self) -> Any:
        graph = super().end()
        self._made[0] += 1
        return WrongGraph(graph, self._kind) if graph is not None and self._made[0] == self._wrong + 1 else graph


def plant_in_a_replay(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    _, regions = plan_of(Deep())
    sites = [index for index, piece in enumerate(regions) if piece >= 0]
    made, wrong, kind = [0], draw.randrange(len(sites)), ("another value", "former rows", "not replayed")[seed % 3]
    found = find(
        Deep(), PlantedCompiler(lambda text: text), folder=folder, make_device=lambda: WrongDevice(made, wrong, kind)
    )
    what = (seed, wrong, kind, found)
    assert (found.stage, found.region, found.piece) == (CAPTURE, sites[wrong], regions[sites[wrong]]), what
    assert found.inside is not None and found.inside.origin == REPLAY, what
    assert found.difference is not None and found.difference.is_fault, what
    assert (folder / "repro.py").is_file() and all(count <= 2 * 6 for count in found.calls.values()), what


@pytest.mark.parametrize("seed", range(3))
def test_a_fault_of_the_replay_is_told_from_one_of_the_piece(seed: int, tmp_path: Path) -> None:
    plant_in_a_replay(seed, tmp_path / "repro")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 30))
def test_a_fault_of_the_replay_is_found_wherever_it_is(seed: int, tmp_path: Path) -> None:
    plant_in_a_replay(seed, tmp_path / "repro")


def test_a_fault_of_the_trace_is_told_from_one_of_the_compiler() -> None:
    """The model draws on state that the trace does not see: what it gives is not what its graph gives."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.register_forward_pre_hook(lambda module, given: None)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.cases.fresh(x * self.scale)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) + (0.0 if torch.compiler.is_compiling() else 1.0)

    found = find(Changing(), PlantedCompiler(lambda text: text))
    assert found.stage == TRACE and found.difference is not None and found.tensor == "result"


def test_modes_without_stages_are_refused() -> None:
    with pytest.raises(OptionError, match="mode `none` has no stages to compare"):
        bisect(Deep(), inputs(), options=pw.CompileOptions(mode="none"))


def test_every_stage_has_its_name() -> None:
    stages = {EQUAL, TRACE, AOT, COMPILE, BIND, CAPTURE}
    assert stages == {"equal", "trace", "aot", "compile", "bind", "capture"}
