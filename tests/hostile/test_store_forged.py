"""Records whose bytes are whole and whose content is not theirs: parts of another model's, edited, of odd shape."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.errors import CorruptEntry, PieceworkError
from piecework.events import Recorder, RecordHit, StoreWarning, ignore
from piecework.store.disk import DiskStore
from piecework.store.envelope import RECORD_WORD, encode_record, seal
from piecework.store.layout import record_parts
from piecework.values.faults import CHECKS, artifact_fault, program_fault

Name = tuple[str, str]
NUMBERS = torch.linspace(-1, 1, 40).reshape(5, 8)
RUNS = {"kind", "text", "kernels", "guards", "facts"}  # what an artifact runs, of which its key says nothing
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 3.5, "", [], {}, "x", [1], {"a": 1}, 10**40, "\ud800", "../../etc/passwd", "0" * 64, [[]] * 3,
)  # fmt: skip


def make(act: type[nn.Module], bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=bias), act(), nn.Linear(8, 8)).eval()


MODELS: tuple[Callable[[], nn.Module], ...] = (
    lambda: make(nn.SiLU), lambda: make(nn.GELU), lambda: make(nn.SiLU, bias=False),
)  # fmt: skip


def start(store: Any, model: nn.Module, observer: Any = ignore) -> None:
    """Start a model from a store, and hold its results to its own."""
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64)
    dynamic = {"input": {0: "tokens"}}
    program = pw.compile(model, (torch.ones(3, 8),), dynamic=dynamic, options=options, store=store, observer=observer)
    with torch.no_grad():
        assert torch.equal(program(NUMBERS), model(NUMBERS))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "store"
    for model in MODELS:
        start(DiskStore(path), model())
    return path


def records_of(path: Path) -> dict[Name, Any]:
    store = DiskStore(path)
    return {(kind, key): store.read_record(kind, key) for kind in CHECKS for key in store.list_records(kind)}


def places_of(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if before:
        yield before
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places_of(one, (*before, name))


def look(value: Any, place: Sequence[Any]) -> Any:
    for name in place:
        value = value[name]
    return value


def forge(records: dict[Name, Any], name: Name, chance: random.Random) -> Any:
    """Return a record with another's part, an odd value, a part of itself elsewhere, or without a part of its own."""
    record = copy.deepcopy(records[name])
    others = [other for other in records if other[0] == name[0] and other != name]
    if chance.random() < 0.1:
        return copy.deepcopy(records[chance.choice(others)])
    for _ in range(chance.choice([1, 1, 2])):
        places = [place for place in places_of(record) if name[0] == "program" or place[0] not in RUNS]
        place = chance.choice(places)
        parent, turn = look(record, place[:-1]), chance.randrange(4)
        try:
            if turn == 0:
                parent[place[-1]] = chance.choice(ODD)
            elif turn == 1:
                del parent[place[-1]]
            elif turn == 2:
                parent[place[-1]] = copy.deepcopy(look(records[chance.choice(others)], place))
            else:
                parent[place[-1]] = copy.deepcopy(look(record, chance.choice(places)))
        except (KeyError, IndexError, TypeError):  # the other has no such place
            pass
    return record


def write(root: Path, name: Name, record: Any) -> None:
    root.joinpath(*record_parts(*name)).write_bytes(seal(RECORD_WORD, encode_record(*name, record)))


@pytest.mark.parametrize("count", [pytest.param(25, id="tenth"), pytest.param(600, id="full", marks=pytest.mark.soak)])
@pytest.mark.parametrize("checks", [CHECKS, {}], ids=["told by the store", "told by the start"])
def test_a_record_of_other_content_is_a_miss_and_made_anew(
    template: Path, tmp_path: Path, count: int, checks: Any
) -> None:
    records, seen = records_of(template), Counter[bool]()
    for number in range(count):
        chance, root = random.Random(f"forged {number}"), tmp_path / str(number)
        shutil.copytree(template, root)
        name = chance.choice(sorted(records))
        forged = forge(records, name, chance)
        write(root, name, forged)
        is_same = json.dumps(forged, sort_keys=True) == json.dumps(records[name], sort_keys=True)
        recorder = Recorder()
        for model in MODELS:
            start(DiskStore(root, checks=checks, observer=recorder), model(), recorder)
        told = [warning.path for warning in recorder.of(StoreWarning)]
        assert set(told) <= {str(root.joinpath(*record_parts(*name)))}
        seen[bool(told)] += 1
        if is_same:
            assert not told
        recorder = Recorder()
        for model in MODELS:
            start(DiskStore(root, checks=checks, observer=recorder), model(), recorder)
        assert len(recorder.of(RecordHit)) == len(MODELS) and not recorder.of(StoreWarning)
        shutil.rmtree(root)
    assert seen[True] > count // 3


@pytest.mark.parametrize("part", sorted(RUNS))
@pytest.mark.parametrize("odd", [None, 3.5, "x", {"a": 1}, [[1]], "0" * 64, "another's"], ids=lambda odd: str(odd)[:12])
def test_what_an_artifact_runs_is_never_an_ugly_error(template: Path, tmp_path: Path, part: str, odd: Any) -> None:
    """Who may write it may run code here; who wrote nonsense there is told so, or it is made anew."""
    root, records = tmp_path / "store", records_of(template)
    shutil.copytree(template, root)
    for name, record in records.items():
        if name[0] == "artifact":
            program = next(key for kind, key in records if kind == "program")
            value = records["program", program]["evidence"] if odd == "another's" else odd
            write(root, name, record | {part: value})
    for model in MODELS:
        try:
            start(DiskStore(root, checks=CHECKS), model())
        except PieceworkError as error:
            assert "Traceback" not in str(error)


def test_the_reasons_are_told(template: Path) -> None:
    records = records_of(template)
    (artifact, key), (program, own) = sorted(records)[0], sorted(records)[-1]
    assert (artifact, program) == ("artifact", "program")
    assert [CHECKS[kind](name, record) for (kind, name), record in records.items()] == [""] * len(records)
    whole = records[artifact, key]
    lacking = {name: value for name, value in whole.items() if name != "guards"}
    begin = "it does not hold what an artifact's format says: "
    assert artifact_fault(key, lacking) == f"{begin}`guards` is missing"
    assert artifact_fault(key, whole | {"facts": 3}) == f"{begin}`facts` is `3`"
    assert artifact_fault(key, whole | {"kernels": {"k": 3}}) == f"{begin}a kernel is no digest"
    assert artifact_fault(key, whole | {"guards": [3]}) == f"{begin}a guard is no text"
    another = "its key was made of other content: it is another record, or was changed"
    assert artifact_fault("0" * 64, whole) == another
    assert program_fault(own, records[program, own] | {"cpp_compiler": "x"}) == another
    assert program_fault(own, {}).startswith("a program record does not hold what its format says")
    assert artifact_fault(key, whole | {"factors": {"x": float("nan")}}).startswith("no key can be made of it")


def test_under_strict_it_is_an_error_that_names_the_file(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(template, root)
    key, record = next((key, record) for (kind, key), record in records_of(root).items() if kind == "program")
    write(root, ("program", key), record | {"notes": {"another": 1}})
    with pytest.raises(CorruptEntry, match="is damaged: its key was made of other content"):
        DiskStore(root, checks=CHECKS, strict=True).read_record("program", key)
