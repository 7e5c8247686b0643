"""Run the command line, here or in a process of its own, and a tiny model for it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from piecework.cli.main import run
from tiny_models import VOCABULARY, tiny_folder


@dataclass(frozen=True)
class Done:
    """What a command gave."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)


def piecework(*arguments: str | Path) -> Done:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return Done(code, out.getvalue(), err.getvalue())


def piecework_process(*arguments: str | Path, **variables: str) -> Done:
    """Run a command in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIECEWORK_")}
    environment = kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"} | variables
    done = subprocess.run(
        [sys.executable, "-m", "piecework.cli.main", *map(str, arguments)],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def llama_folder(folder: Path, **changed: Any) -> Path:
    """Write a random three-layer Llama with a tokenizer of words `w0 w1 …`, one a token id."""
    tiny_folder("llama", folder, **changed)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
