"""The commands about a store and about the machine, on a store that a build filled."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.command import Done, llama_folder, piecework, piecework_process

EAGER = ("--compiler", "eager", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, list[str]]:
    """Build twice, once with one range more; return the store and both keys."""
    store = tmp_path_factory.mktemp("stores") / "store"
    keys = [
        piecework("build", model, "--store", store, *EAGER, *more).out.strip() for more in ((), ("--single-sizes", "8"))
    ]
    return store, keys


@pytest.fixture
def store(built: tuple[Path, list[str]], tmp_path: Path) -> Path:
    copy = tmp_path / "store"
    shutil.copytree(built[0], copy)
    return copy


def on(store: Path, *arguments: str | Path) -> Done:
    return piecework("store", *arguments, "--store", store)


def test_ls(store: Path, built: tuple[Path, list[str]]) -> None:
    listed = on(store, "ls", "--json").document
    assert {each["kind"] for each in listed} == {"program", "artifact"}
    assert {each["key"] for each in listed if each["kind"] == "program"} == set(built[1])
    lines = on(store, "ls", "--kind", "program").out.splitlines()
    assert [line.split()[0] for line in lines] == ["kind", "program", "program"]
    assert piecework("store", "ls", "--store", store / "empty").out == ""


def test_show_by_the_beginning_of_a_key(store: Path, built: tuple[Path, list[str]]) -> None:
    found = on(store, "show", built[1][0][:12], "--json").document
    assert found["key"] == built[1][0]
    assert len(found["record"]["pieces"]) == 3
    assert "record.factors.compiler.name: eager" in on(store, "show", built[1][0]).out
    missing = on(store, "show", "0000")
    assert (missing.code, missing.out) == (3, "")


def test_why_names_the_factor(store: Path, built: tuple[Path, list[str]]) -> None:
    found = on(store, "why", *built[1], "--json").document
    assert [each["factor"] for each in found] == ["config.options.single_sizes"]
    assert on(store, "why", *built[1]).out == "config.options.single_sizes: `[]` / `[8]`\n"
    assert "nothing that a lookup compares differs" in on(store, "why", built[1][0], built[1][0]).out


def test_stat_and_gc(store: Path) -> None:
    before = on(store, "stat", "--json").document
    assert before["records"]["program"] == 2
    assert "2 program" in on(store, "stat").out
    done = on(store, "gc", "--max-bytes", "0", "--json").document
    assert len(done["evicted"]) == sum(before["records"].values())
    assert on(store, "stat", "--json").document["records"] == {}
    assert not list(store.rglob("computation_graph.py"))
    assert on(store, "gc", "--max-bytes", "much").code == 2


def test_verify_finds_and_repairs(store: Path) -> None:
    assert on(store, "verify").out == "every entry is whole\n"
    blob = max((store / "blobs").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    found = on(store, "verify", "--json")
    assert found.code == 1
    assert [fault["path"] for fault in found.document["faults"]] == [str(blob)]
    assert on(store, "verify", "--repair").code == 0
    assert not blob.exists()


def test_export_and_import_start_warm_elsewhere(
    store: Path, built: tuple[Path, list[str]], model: Path, tmp_path: Path
) -> None:
    archive, other = tmp_path / "one.tar", tmp_path / "other"
    assert on(store, "export", archive, "--key", built[1][0], "--json").document["records"]
    assert on(other, "import", archive).out.startswith("added 10 records")
    again = piecework("build", model, "--store", other, "--json", *EAGER).document
    assert (again["compiled"], again["key"]) == (0, built[1][0])
    archive.write_bytes(archive.read_bytes()[:1000])
    assert on(other, "import", archive).code == 1


def test_signed_records(store: Path, model: Path, tmp_path: Path) -> None:
    key, keys = tmp_path / "team.key", tmp_path / "trusted"
    assert piecework("store", "keygen", key).code == 0
    assert piecework("store", "trust", tmp_path / "team.pub", "--trusted-keys", keys).out == f"1 keys added to {keys}\n"
    signed = ("--trust", "signed", "--trusted-keys", str(keys), "--json", *EAGER)
    refused = piecework("build", model, "--store", store, *signed)
    assert refused.code == 5
    assert "`piecework store sign --key FILE.key` signs it" in refused.err
    assert on(store, "sign", "--key", key).out.startswith("signed ")
    warm = piecework("build", model, "--store", store, *signed)
    assert (warm.code, warm.document["compiled"]) == (0, 0)
    unknown = piecework("build", model, "--store", store, "--trust", "signed", "--trusted-keys", tmp_path / "none")
    assert unknown.code == 2


def test_doctor(store: Path, tmp_path: Path) -> None:
    done = piecework("doctor", "--store", store, "--json")
    states = {finding["what"]: finding["state"] for finding in done.document["findings"]}
    assert states["torch"] in ("works", "untested")
    assert states["store"] == states["safetensors"] == "works"
    assert (done.code == 0) == ("fails" not in states.values())
    (tmp_path / "file").write_text("")
    text = piecework("doctor", "--store", tmp_path / "file" / "store")
    assert text.code == 1
    assert re.search(r"^NO  store: ", text.out, re.MULTILINE)


def test_doctor_without_a_compiler(store: Path) -> None:
    done = piecework_process("doctor", "--json", "--store", store, PATH="/nowhere", CXX="")
    found = next(each for each in done.document["findings"] if each["what"] == "C++ compiler")
    assert (done.code, found["state"]) == (1, "fails")
    assert "a cold start on a CPU needs one" in found["reason"]


@pytest.mark.parametrize("arguments", [("--help",), ("store", "ls"), ("store", "stat"), ("generate", "--help")])
def test_what_needs_no_torch_loads_none(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom piecework.cli.main import run\n"
        f"code = run({[*arguments]!r})\n"
        "print(code, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PIECEWORK_STORE": str(tmp_path / "store")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_terminal_gets_a_bar_and_standard_output_the_document_alone(model: Path, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "piecework.cli.main", "build", str(model), "--store", str(tmp_path), "--json", *EAGER],
        stdout=subprocess.PIPE, stderr=follower, text=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as process:  # fmt: skip
        os.close(follower)
        shown = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # the other end was closed
                break
            shown += chunk
            if not chunk:
                break
        assert process.stdout is not None
        done = Done(process.wait(timeout=300), process.stdout.read(), shown.decode())
    os.close(leader)
    assert done.code == 0, done.err
    assert done.document["compiled"] == 9
    assert "tracing" in done.err or "building the model" in done.err
    assert "\x1b[" in done.err
    assert "Dynamo bytecode transform time" in done.err
