"""Each rank's share of the rows: the same tokens, the same bytes over the wire; the shorter residual crosses cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import piecework as pw
from parallel.programs import alternate, options, tell, tell_each
from parallel.several_ranks import on_ranks
from piecework.api.folder import build_folder
from piecework.errors import PassError
from piecework.parallel.wire import count_collectives, sent_bytes
from piecework.seam.groups import standing_in
from tiny_models import tiny_folder

PASSES = ("sequence_parallel",)
FOUR = ("llama", "qwen3", "mixtral", "gemma2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> pw.DiskStore:
    return pw.DiskStore(tmp_path_factory.mktemp("store"))


def record_of(folder: Path, store: Any, **more: Any) -> Any:
    return build_folder(folder, options=options(2, "eager", **more), store=store).record


def check_bytes(plain: Any, shared: Any) -> None:
    """Every sum became a sum of shares and a gathering; where the ranks divide the rows, no byte is sent beside."""
    sums = count_collectives(plain.notes)["all_reduce"]
    counts = count_collectives(shared.notes)
    assert (counts["reduce_scatter_tensor"], counts["all_gather_into_tensor"]) == (sums, sums + 1)
    assert "all_reduce" not in counts
    for tokens in (2, 64, 4096):
        sizes = {"tokens": tokens, "rows": 2}
        assert sent_bytes(plain.notes, sizes) == sent_bytes(shared.notes, sizes) > 0


def test_the_shorter_residual_crosses_cuts_and_no_more_is_sent(folder: Path, store: pw.DiskStore) -> None:
    plain, shared = record_of(folder, store), record_of(folder, store, passes=PASSES)
    check_bytes(plain, shared)
    (report,) = (each for each in shared.notes["passes"] if each["name"] == "sequence_parallel")
    places = [place.partition(": the ")[2].partition(" of")[0] for place in report["places"]]
    assert (places[0], set(places[1:-1]), places[-1]) == ("first", {"middle"}, "last")
    middle = store.read_blob(shared.pieces[1].text).decode()
    assert 'x1: "float32[1, (1 + s0) // 2, 32] cpu"' in middle
    assert (len(shared.pieces), len(plain.pieces)) == (3, 3)


@pytest.mark.slow
def test_on_and_off_give_the_same_tokens(folder: Path, store: pw.DiskStore) -> None:
    """Prompts of one and of eleven tokens, and steps of one: numbers of rows that two ranks do not divide."""
    record_of(folder, store, passes=PASSES)
    alone = tell(folder, None, 1, "eager", {"mode": "none"})
    found = on_ranks(2, tell_each, [folder], [store.path], 2, "eager", {"passes": PASSES})
    assert [each["llama"]["tokens"] for each in found] == [alone["tokens"]] * 2
    assert [each["llama"]["traced"] for each in found] == [0, 0]


@pytest.mark.parametrize("is_reversed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_engines_of_one_process_share_nothing(folder: Path, store: pw.DiskStore, is_reversed: bool) -> None:
    """One rank alone, two, and two that share out rows: whichever is made first, each answers as if it were alone."""
    settings = [{"ranks": 1, "passes": ()}, {"ranks": 2, "passes": ()}, {"ranks": 2, "passes": PASSES}]
    for one in settings[1:]:
        record_of(folder, store, passes=one["passes"])
    order = settings[::-1] if is_reversed else settings
    found = on_ranks(2, alternate, folder, store.path, order)
    alone = [each[:6] for each in tell(folder, None, 1, "eager", {"mode": "none"})["tokens"]]
    assert found == [[alone] * 6] * 2


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["fx", "inductor", "none"])
@pytest.mark.parametrize("name", FOUR)
def test_every_architecture_and_partition(name: str, partition: str, tmp_path: Path) -> None:
    model, compiler = tiny_folder(name, tmp_path / name), "inductor" if partition == "inductor" else "eager"
    more = {"passes": PASSES, "partition": partition}
    alone = tell(model, None, 1, "eager", {"mode": "none"})
    found = on_ranks(2, tell_each, [model], [tmp_path / "store"], 2, compiler, more)
    assert [each[name]["tokens"] for each in found] == [alone["tokens"]] * 2
    check_bytes(record_of(model, pw.MemoryStore(), partition=partition), record_of(model, pw.MemoryStore(), **more))


class Sent(TorchDispatchMode):
    """Counts the bytes that one of two ranks sends, from the tensors that collectives are really given."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("_c10d_functional.") and "wait" not in name:
            # Of two ranks each sends half of what it sums, twice, or all that the other is to have.
            self.sent += args[0].nbytes // (2 if "reduce_scatter" in name else 1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("passes", [(), PASSES])
@pytest.mark.parametrize("rows", [7, 8])
def test_the_count_is_what_a_step_sends(folder: Path, store: pw.DiskStore, passes: tuple[str, ...], rows: int) -> None:
    from parallel.one_step import run_step_alone

    record = record_of(folder, store, passes=passes)
    with standing_in("tensor_parallel_2", 2), Sent() as counted:
        run_step_alone(record, store, folder, rows)
    assert counted.sent == sent_bytes(record.notes, {"tokens": rows, "rows": 2})


@pytest.mark.slow
def test_a_pass_on_one_piece_may_not_shorten_what_crosses_a_cut(folder: Path) -> None:
    @pw.graph_pass("shorten", runs_on="piece")
    def shorten(piece: Any) -> pw.Rewritten:
        output = piece.graph.output_node()
        first = output.args[0][0]
        with piece.graph.inserting_before(output):
            short = piece.graph.call_function(torch.ops.aten.slice.Tensor, (first, 1, 0, 1))
        output.args = ((short, *output.args[0][1:]),)
        return pw.Rewritten(piece, ("one",))

    with pytest.raises(PassError) as caught:
        build_folder(folder, options=options(2, "aot_eager", passes=(shorten,)), store=pw.MemoryStore())
    assert "pass `shorten` broke the graph" in caught.value.message
    assert "it crosses a cut" in caught.value.message
