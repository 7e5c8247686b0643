"""A bug report holds every trace and no secret; tlparse finds pieces and ranges in it by our names."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.command import Done, llama_folder, piecework_process
from piecework.diagnostics.attribution import attribute
from piecework.diagnostics.run_file import read_run
from piecework.seam.torch_trace import file_name

FLAGS = ("--compiler", "eager", "--max-num-batched-tokens", "256")
SECRETS = ("hf_plantedAAAABBBBCCCC", "planted-word-9f2", "hunter2hunter2", "s3cretquery", "planteduser")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machine") / "home" / "planteduser"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def report(home: Path) -> tuple[Done, Path]:
    model = llama_folder(home / "models" / "tiny")
    config = json.loads((model / "config.json").read_text())
    config["_name_or_path"] = f"https://planteduser:hunter2hunter2@example.org/m?token=s3cretquery&x={home}"
    (model / "config.json").write_text(json.dumps(config))
    folder = home.parent / "report"
    done = piecework_process(
        "trace", model, folder, *FLAGS, "--json",
        HOME=str(home), USER="planteduser", HF_TOKEN="hf_plantedAAAABBBBCCCC", MY_API_KEY="planted-word-9f2",
        TORCH_EXTRA="planted-word-9f2", HF_ENDPOINT="https://planteduser:hunter2hunter2@example.org",
    )  # fmt: skip
    return done, folder


def test_every_trace_is_collected(report: tuple[Done, Path]) -> None:
    done, folder = report
    found = done.document
    assert (done.code, found["exit_code"]) == (0, 0)
    single = {name for name in found["files"] if "/" not in name}
    assert single == {
        "answer.json", "config.json", "doctor.json", "environment.json", "events.jsonl", "log.txt", "run.json",
    }  # fmt: skip
    assert len([name for name in found["files"] if name.startswith("torch_trace/")]) == 1
    run = read_run(folder / "run.json")
    assert {event["name"] for event in run.of("Phase")} >= {"interpreter", "arguments", "trace", "compile"}
    assert {event["package"] for event in run.of("Imported")} >= {"torch", "cyclopts", "transformers"}
    assert attribute(run).explained > 0.9
    assert "compiled 9 artifacts" in (folder / "log.txt").read_text()
    assert json.loads((folder / "answer.json").read_text())["distinct"] == 3
    assert all(json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines())


def test_no_secret_no_name_and_no_absolute_path_is_left(report: tuple[Done, Path], home: Path) -> None:
    _, folder = report
    places = [str(home), str(home.parent), sys.prefix, str(Path(__file__).parents[2]), "site-packages"]
    for path in folder.rglob("*"):
        text = path.read_text() if path.is_file() else ""
        left = [word for word in (*SECRETS, *places, platform.node()) if len(word) > 2 and word in text]
        assert (path.name, left) == (path.name, [])
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["HF_TOKEN"] == environment["TORCH_EXTRA"] == "[removed]"
    assert environment["HF_ENDPOINT"] == "https://[removed]@example.org"


def test_tlparse_finds_pieces_and_ranges_by_our_names(report: tuple[Done, Path], tmp_path: Path) -> None:
    parser = shutil.which("tlparse", path=str(Path(sys.executable).parent)) or shutil.which("tlparse")
    if parser is None:
        pytest.skip("tlparse is not installed: it comes with `piecework[dev]`")
    (log,) = (report[1] / "torch_trace").iterdir()
    out = tmp_path / "out"
    done = subprocess.run(
        [parser, str(log), "-o", str(out), "--no-browser", "--strict-compile-id"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compiled = read_run(report[1] / "run.json").of("ArtifactCompiled")
    index = (out / "index.html").read_text()
    groups: dict[str, set[str]] = {}
    for event in compiled:
        piece = event["piece"]
        assert piece in index and event["range"] in index
        (text,) = out.rglob(f"{file_name(piece, event['range'])}.text_*.txt")
        assert "def " in text.read_text()
        groups.setdefault(piece, set()).add(text.parent.name.split("_")[1])
    # A piece is one frame, and its ranges are that frame's compiles.
    assert len(groups) == 3
    assert all(len(frames) == 1 for frames in groups.values())
    assert len({frame for frames in groups.values() for frame in frames}) == 3


def test_a_build_that_fails_is_collected_too(tmp_path: Path) -> None:
    model = llama_folder(tmp_path / "tiny")
    (model / "config.json").write_text("{}")
    done = piecework_process("trace", model, tmp_path / "report", *FLAGS, "--json")
    assert (done.code, done.document["exit_code"]) == (0, 1)
    assert "ModelError" in (tmp_path / "report" / "log.txt").read_text()
    assert read_run(tmp_path / "report" / "run.json").of("Phase")
    again = piecework_process("trace", model, tmp_path / "report", *FLAGS)
    assert again.code == 2
    assert "is not an empty folder" in again.err
