"""Without numpy nothing warns: it is no requirement of ours, and torch complains where it is asked for its arrays."""

from __future__ import annotations

from pathlib import Path

from e2e.command import llama_folder, piecework, piecework_process
from toy_box import run_starts, write_package

ABSENT = 'raise ModuleNotFoundError("no numpy here", name="numpy")\n'


def test_a_start_without_numpy_warns_of_nothing(tmp_path: Path) -> None:
    """Each process makes warnings errors, but for the one that torch's own import gives."""
    folder = write_package(tmp_path / "code")
    (folder / "numpy.py").write_text(ABSENT)
    cold = run_starts(folder, tmp_path / "store")
    assert cold.starts[0].difference < 1e-5
    warm = run_starts(folder, tmp_path / "store", [{}, {"load": cold.starts[0].key}], read_only=True)
    for process in (cold, warm):
        assert "numpy" not in process.modules
        assert "NumPy" not in process.errors
        assert "Warning" not in process.errors
    assert warm.starts[0].is_hit
    assert warm.starts[1].loaded == 6


def test_a_command_without_numpy_warns_of_nothing(tmp_path: Path) -> None:
    """Building reads the model's class, which wants numpy; generating from the store does not."""
    model, store = llama_folder(tmp_path / "model"), tmp_path / "store"
    flags = ("--store", store, "-cc.compiler=eager", "--prompt-ids", "5,6,7", "--max-tokens", "3", "--json")
    built = piecework("generate", model, *flags)
    assert built.code == 0, built.err
    (tmp_path / "numpy.py").write_text(ABSENT)
    done = piecework_process("generate", model, *flags, PYTHONPATH=str(tmp_path))
    assert done.code == 0, done.err
    assert done.document["token_ids"] == built.document["token_ids"]
    assert done.document["compiled"] == 0
    assert "umpy" not in done.err
    assert "NumPy" not in done.err
