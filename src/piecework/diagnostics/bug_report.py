"""All that a bug report needs in one folder: a build is run in a process of its own, and what it left is collected.

    run.json         the timeline: opens in Perfetto, and `piecework report` reads it
    events.jsonl     the events, also of a build that was killed
    log.txt          what the build printed on standard error, its traceback where it failed
    answer.json      what it answered
    torch_trace/     torch's own trace, for tlparse: pieces and ranges by our names
    doctor.json      what works on the machine
    config.json      the model's configuration
    environment.json variables that change what is compiled

Everything is text, and is written without secrets, user name, host name and absolute paths.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from piecework.diagnostics.redaction import Redaction
from piecework.errors import OptionError

_KEPT_VARIABLES = ("PIECEWORK_", "TORCH", "TRITON", "CUDA", "NVIDIA_", "OMP_", "MKL_", "PYTHON", "HF_", "TRANSFORMERS_")
_COMMAND = ("-m", "piecework.cli.main")


@dataclass(frozen=True)
class BugReport:
    """The folder, its files, and how the build in it ended."""

    folder: Path
    files: tuple[str, ...]
    exit_code: int


def collect_bug_report(
    model: str, folder: Path, flags: Sequence[str], variables: Mapping[str, str], *, timeout_s: float = 3600.0
) -> BugReport:
    """Build a model in a process of its own under every trace there is, and write what it left into `folder`.

    `flags` are those of `piecework build`; a build that fails is collected like another. Raises OptionError where
    `folder` holds something already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"`{folder}` is not an empty folder", hint="name one that does not exist yet")
    with tempfile.TemporaryDirectory(prefix="piecework-trace-") as place:
        raw = Path(place)
        code = _build(model, flags, variables, raw, timeout_s)
        _describe(model, variables, raw, timeout_s)
        redaction = _redaction(model, variables, raw)
        names = sorted(str(path.relative_to(raw)) for path in raw.rglob("*") if path.is_file())
        for name in names:
            text = (raw / name).read_text(encoding="utf-8", errors="replace")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(redaction.apply(text), encoding="utf-8")
    return BugReport(folder, tuple(names), code)


def _build(model: str, flags: Sequence[str], variables: Mapping[str, str], raw: Path, timeout_s: float) -> int:
    watched = ["--timeline", str(raw / "run.json"), "--events", str(raw / "events.jsonl"), "--json", "--debug"]
    traced = {**variables, "TORCH_TRACE": str(raw / "torch_trace")}
    code, answer, log = _run(["build", model, *flags, *watched], traced, timeout_s)
    (raw / "answer.json").write_text(answer, encoding="utf-8")
    (raw / "log.txt").write_text(log, encoding="utf-8")
    return code


def _describe(model: str, variables: Mapping[str, str], raw: Path, timeout_s: float) -> None:
    (raw / "doctor.json").write_text(_run(["doctor", "--json"], variables, timeout_s)[1], encoding="utf-8")
    kept = {name: value for name, value in sorted(variables.items()) if name.startswith(_KEPT_VARIABLES)}
    (raw / "environment.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    config = Path(model).expanduser() / "config.json"
    if config.is_file():
        shutil.copyfile(config, raw / "config.json")


def _run(arguments: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            [sys.executable, *_COMMAND, *arguments],
            env=dict(variables), capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        told = late.stderr or b""
        log = told.decode(errors="replace") if isinstance(told, bytes) else told
        return 124, "", f"{log}\nit took more than {timeout_s:.0f} s and was ended"
    return done.returncode, done.stdout, done.stderr


def _redaction(model: str, variables: Mapping[str, str], raw: Path) -> Redaction:
    import_folder = str(Path(__file__).resolve().parents[2])
    places = {
        "home": variables.get("HOME", ""),
        "model": os.path.abspath(os.path.expanduser(model)) if os.path.isdir(os.path.expanduser(model)) else "",
        "here": os.getcwd(),
        "trace": str(raw),
        "source": import_folder,
        "python": sys.prefix,
    }
    words = {"user": _user(variables), "host": platform.node()}
    return Redaction.of(variables, places, words)


def _user(variables: Mapping[str, str]) -> str:
    try:
        return variables.get("USER") or variables.get("LOGNAME") or getpass.getuser()
    except (OSError, KeyError):
        return ""
