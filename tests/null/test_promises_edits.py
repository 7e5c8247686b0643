"""What an edit of the model's files costs: a trace, and the artifacts of the pieces whose text it changed; no more."""

from __future__ import annotations

from pathlib import Path

from toy_box import Started, run_starts, write_package


def start_after(folder: Path, store: Path, *, cwd: Path | None = None, **edits: tuple[str, str]) -> Started:
    """Edit the package, and start it in a fresh process."""
    write_package(folder, {f"{name}.py": edit for name, edit in edits.items()})
    return run_starts(folder, store, cwd=cwd).starts[0]


def test_an_edit_costs_what_it_changed(tmp_path: Path) -> None:
    folder, store = tmp_path / "code", tmp_path / "store"
    cold = start_after(folder, store)
    assert cold.has_traced
    # Three pieces, each for size 1 and for 2 to 64; the eager compiler's text serves both, and yet each has its key.
    assert len(cold.compiled) == len(set(cold.compiled)) == 6

    again = start_after(folder, store)
    assert again.is_hit and not again.has_traced and again.compiled == []

    # The MLP stands in the middle and in the last piece, not in the first.
    edited = start_after(folder, store, mlp=("* self.scale", "* self.scale + 1"))
    assert edited.has_traced and not edited.is_hit
    assert "toybox/mlp.py` changed" in edited.reasons
    assert len(edited.compiled) == 4
    assert len(edited.reused) == 2
    assert set(edited.reused) <= set(cold.compiled)
    assert edited.difference < 1e-5

    # A comment: the bytes of the file are others, so it is traced again; no text is another, so nothing compiles.
    commented = start_after(folder, store, mlp=("return self.down", "# Down again.\n        return self.down"))
    assert commented.compiled == []
    assert set(commented.reused) == set(cold.compiled)
    assert commented.difference < 1e-5

    # A function that the trace inlined in another file.
    helper = start_after(folder, store, gates=("functional.silu(left)", "torch.sigmoid(left)"))
    assert "toybox/gates.py` changed" in helper.reasons
    assert len(helper.compiled) == 4
    assert helper.difference < 1e-5

    # Undone: the first record holds again.
    undone = start_after(folder, store)
    assert undone.is_hit and undone.key == cold.key and undone.compiled == []


def test_a_file_that_the_trace_did_not_read_costs_nothing(tmp_path: Path) -> None:
    folder, store = tmp_path / "code", tmp_path / "store"
    cold = start_after(folder, store)
    (folder / "toybox" / "unused.py").write_text("raise RuntimeError\n")
    again = start_after(folder, store)
    assert again.is_hit and again.key == cold.key


def test_the_model_moves(tmp_path: Path) -> None:
    """Its folder, the working folder and the store are elsewhere; the processes have other numbers in any case."""
    cold = start_after(tmp_path / "code", tmp_path / "store", cwd=tmp_path)
    elsewhere = tmp_path / "deep" / "er"
    elsewhere.mkdir(parents=True)
    (tmp_path / "code").rename(elsewhere / "other")
    (tmp_path / "store").rename(elsewhere / "kept")
    moved = start_after(elsewhere / "other", elsewhere / "kept", cwd=elsewhere)
    assert moved.is_hit and moved.key == cold.key
    assert moved.compiled == [] and not moved.has_traced
