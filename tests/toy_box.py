"""A model in a package of its own, written by the test that edits it, and processes that start it.

Eight layers with a residual norm, a gated MLP in a module of its own, and an opaque operator that mixes tokens; three
distinct pieces. What a start did is told by its events, in a process that imports nothing of the test.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = {
    "__init__.py": '"""A toy."""\n',
    "ops.py": """
import torch

import piecework as pw

_library = torch.library.Library("toybox", "FRAGMENT")
_library.define("mix(Tensor query, Tensor value, str name) -> Tensor")


@pw.split_op("toybox::mix")
def mix(query, value, name):
    return query + value.cumsum(0)


_library.impl("mix", mix, "CPU")
_library.define("second(Tensor query) -> Tensor")
_library.impl("second", lambda query: query * 2, "CPU")
torch.library.register_fake("toybox::mix", lambda query, value, name: torch.empty_like(query), lib=_library)
torch.library.register_fake("toybox::second", lambda query: torch.empty_like(query), lib=_library)
""",
    "gates.py": '''
import torch
from torch.nn import functional

USE_GELU = False


def gate(left, right):
    """Gate one half by the other."""
    if USE_GELU:
        return functional.gelu(left) * right
    return functional.silu(left) * right
''',
    "mlp.py": """
import torch
from torch import nn

from toybox.gates import gate


class FeedForward(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(2 * width, width, bias=bias)
        self.scale = 3

    def forward(self, hidden):
        left, right = self.up(hidden).chunk(2, dim=-1)
        return self.down(gate(left, right)) * self.scale
""",
    "model.py": """
import torch
from torch import nn

import piecework as pw
import toybox.ops
from toybox.mlp import FeedForward


class Norm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden):
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


class Layer(nn.Module):
    def __init__(self, width, bias, epsilon, index):
        super().__init__()
        self.norm = Norm(width, epsilon)
        self.projection = nn.Linear(width, 2 * width, bias=bias)
        self.feed_forward = FeedForward(width, bias)
        self.name = f"layers.{index}"

    def forward(self, hidden):
        query, value = self.projection(self.norm(hidden)).chunk(2, dim=-1)
        hidden = hidden + torch.ops.toybox.mix(query.contiguous(), value.contiguous(), self.name)
        return hidden + self.feed_forward(hidden)


@pw.compilable(dynamic={"tokens": {0: "tokens"}})
class Model(nn.Module):
    def __init__(self, layers=8, width=16, bias=False, epsilon=1e-5):
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Layer(width, bias, epsilon, index) for index in range(layers))
        self.norm = Norm(width, epsilon)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.ops.toybox.second(self.norm(hidden))


def make(**config):
    torch.manual_seed(0)
    return Model(**config).eval()
""",
}

# The last is torch's own, said at its import.
WARNINGS = (
    "error", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Failed to initialize NumPy:UserWarning",
)  # fmt: skip

# Runs the starts that standard input lists, and prints what each did. What compiles is noted from the very beginning.
CHILD = """
import json, os, sys
programs = []
sys.addaudithook(lambda event, values: programs.append(str(values[0])) if event == "subprocess.Popen" else None)
plan = json.loads(sys.stdin.read())
import torch
import piecework as pw
from piecework import events
from piecework.errors import PieceworkError
from toybox.model import make

def patch(model, patches):
    for place, source in patches.items():
        root, _, path = place.partition(".")
        target = model if root == "model" else sys.modules[root]
        *parents, last = path.split(".")
        for name in parents:
            target = getattr(target, name) if not name.isdigit() else target[int(name)]
        if isinstance(source, str):
            space = dict(vars(target)) if not isinstance(target, torch.nn.Module) else {"torch": torch}
            exec(source, space)
            source = space[last]
        setattr(target, last, source)

def start(one):
    seen = events.Recorder()
    store = pw.DiskStore(plan["store"], read_only=plan["read_only"])
    chosen = {"ranges": ((1, 64),), "max_num_batched_tokens": 64} | plan["options"] | one.get("options", {})
    options = pw.CompileOptions(**chosen)
    tokens = torch.arange(5)
    model = make(**one.get("config", {}))
    import toybox.gates, toybox.mlp, toybox.model
    patch(model, one.get("patch", {}))
    space = {"torch": torch, "pw": pw, "model": model, "tokens": tokens, "chosen": chosen, "sys": sys}
    space["__name__"] = "__main__"
    exec(one.get("run", ""), space)
    model, tokens, options = space["model"], space["tokens"], pw.CompileOptions(**space["chosen"])
    if one.get("load"):
        program = pw.load(store, key=one["load"], weights=model.state_dict(), observer=seen)
    else:
        program = pw.compile(model, (tokens,), options=options, store=store, observer=seen)
    with torch.no_grad():
        got, wanted = program(tokens=tokens), model(tokens)
    exec(one.get("undo", ""), space)
    return {
        "key": program.key,
        "compiled": [event.key for event in seen.of(events.ArtifactCompiled)],
        "reused": [event.key for event in seen.of(events.ArtifactReused)],
        "loaded": len(seen.of(events.ArtifactLoaded)),
        "is_hit": bool(seen.of(events.RecordHit)),
        "misses": [[event.reason, *event.factors] for event in seen.of(events.RecordMiss)],
        "has_traced": "trace" in [event.name for event in seen.of(events.Phase)],
        "difference": float((got - wanted).norm() / wanted.norm()),
        "fall_backs": [event.reason for event in seen.of(events.FallBack)],
    }

if plan["forbid"]:
    with pw.no_compile():
        done = [start(one) for one in plan["starts"]]
else:
    done = [start(one) for one in plan["starts"]]
names = [n for n in sys.modules if n.split(".")[0] in ("torch", "sympy", "triton", "transformers", "numpy")]
print("DONE" + json.dumps({"starts": done, "programs": programs, "modules": names}))
"""


@dataclass(frozen=True)
class Started:
    """What one start did."""

    key: str
    compiled: list[str]
    reused: list[str]
    loaded: int
    is_hit: bool
    misses: list[list[str]]
    has_traced: bool
    difference: float
    fall_backs: list[str]

    @property
    def reasons(self) -> str:
        """Why no record was found, on one line."""
        return " | ".join(word for miss in self.misses for word in miss)


@dataclass(frozen=True)
class Process:
    """What one process did: its starts, the programs that it started, the modules that it imported."""

    starts: list[Started]
    programs: list[str]
    modules: list[str]
    errors: str


def write_package(folder: Path, edits: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """Write the package `toybox` into `folder`; `edits` replace a text in a file by another. Return `folder`."""
    place = folder / "toybox"
    place.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        old, new = (edits or {}).get(name, ("", ""))
        assert old in text, f"{name} holds no `{old}`"
        (place / name).write_text(text.replace(old, new, 1) if old else text)
    return folder


def run_starts(
    folder: Path,
    store: Path,
    starts: Sequence[Mapping[str, Any]] = ({},),
    *,
    options: Mapping[str, Any] | None = None,
    read_only: bool = False,
    forbid: bool = False,
    cwd: Path | None = None,
    **variables: str,
) -> Process:
    """Run starts of the package in `folder` one after another in a fresh process.

    Each may say `config` (of the model), `options`, `patch` (a place to a value, or to source that makes it), `run`
    and `undo` (source round the start, which may change `model`, `tokens` and `chosen`), or `load` (a key, instead of
    compiling).
    """
    plan = {
        "store": str(store), "options": {"compiler": "eager"} | dict(options or {}), "read_only": read_only,
        "forbid": forbid, "starts": list(starts),
    }  # fmt: skip
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "HOME") if name in os.environ}
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *(word for each in WARNINGS for word in ("-W", each)), "-c", CHILD],
        input=json.dumps(plan), capture_output=True, text=True, timeout=900, cwd=cwd, check=False,
        env=kept | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | variables,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("DONE")]
    assert done.returncode == 0 and lines, done.stderr[-4000:]
    result = json.loads(lines[-1].removeprefix("DONE"))
    return Process([Started(**one) for one in result["starts"]], result["programs"], result["modules"], done.stderr)


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, time of change and content of everything in a folder, to compare it with itself later."""
    return {
        path.relative_to(folder).as_posix(): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }
