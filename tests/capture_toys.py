"""A small model with opaque operators, and what the tests of capture share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piecework.api.programs import compile as compile_program
from piecework.capture_options import CaptureOptions
from piecework.events import Observer, Recorder, ignore
from piecework.options import CompileOptions
from piecework.runtime.program import Program
from piecework.runtime.replay import CapturedProgram
from piecework.seam.dry import DryDevice
from piecework.stages.capture import capture, model_source, program_source
from piecework.store.memory import MemoryStore
from piecework.values.declaration import split_op
from piecework.values.device import Device

WIDTH, WORDS = 8, 32
DYNAMIC = {"ids": {0: "tokens"}, "positions": {0: "tokens"}}
_library = torch.library.Library("capture_toys", "DEF")


def operator(schema: str, body: Callable[..., Any], fake: Callable[..., Any], *, support: str) -> None:
    """Register an opaque operator and declare how far it may be captured."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"capture_toys::{name}", fake, lib=_library)
    split_op(f"capture_toys::{name}", capture=support)(body)


def _mix(query: Tensor, key: Tensor, out: Tensor, scale: float) -> None:
    out.copy_(torch.tanh(query * scale) + key)


def _fresh(x: Tensor) -> Tensor:
    return x * 3


def _pick(x: Tensor) -> Tensor:
    return x + x.sum().item()


operator(
    "mix(Tensor query, Tensor key, Tensor(a!) out, float scale) -> ()", _mix, lambda *_: None, support="uniform_decode"
)
operator("fresh(Tensor x) -> Tensor", _fresh, torch.empty_like, support="always")
operator("pick(Tensor x) -> Tensor", _pick, torch.empty_like, support="always")  # it lies: it reads on the host


class Toy(torch.nn.Module):
    """Embedding, some layers with an opaque operator each, a head; a table of positions as buffer."""

    def __init__(self, layers: int = 3, *, is_fresh: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("table", torch.randn(64, WIDTH))
        self.is_fresh = is_fresh

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids) + self.table[positions]
        for layer in self.layers:
            query, key = layer(x).chunk(2, -1)
            if self.is_fresh:
                out = torch.ops.capture_toys.fresh(query) + key
            else:
                out = torch.empty_like(query)
                torch.ops.capture_toys.mix(query, key, out, 0.5)
            x = x + torch.relu(out)
        return self.head(x)


def toy(layers: int = 3, *, is_fresh: bool = False, seed: int = 0) -> Toy:
    """Make a toy with random weights."""
    torch.manual_seed(seed)
    return Toy(layers, is_fresh=is_fresh).requires_grad_(False).eval()


def inputs(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make a step's inputs."""
    source = torch.Generator().manual_seed(seed + 1000 * count)
    return torch.randint(0, WORDS, (count,), generator=source), torch.randint(0, 64, (count,), generator=source)


def compiled(
    model: torch.nn.Module, example: Any = None, *, dynamic: Mapping[str, Any] = DYNAMIC, **options: Any
) -> Program:
    """Compile a model by the eager compiler into memory."""
    settings = {"compiler": "eager", "max_num_batched_tokens": 64, "ranges": ((1, 64),), **options}
    store = MemoryStore()
    return compile_program(
        model, example or inputs(4), dynamic=dynamic, options=CompileOptions(**settings), store=store
    )


def captured(
    model: torch.nn.Module,
    *,
    mode: str = "piecewise",
    device: Device | None = None,
    program: Program | None = None,
    observer: Observer = ignore,
    example: Any = None,
    dynamic: Mapping[str, Any] = DYNAMIC,
    **options: Any,
) -> CapturedProgram:
    """Capture the program of a model, or in mode `none` the model itself, on a dry device."""
    arguments = {name: options.pop(name) for name in ("steps", "phase_of", "fixed", "owners") if name in options}
    options.setdefault("decode_sizes", (1, 2, 4, 8))
    options.setdefault("prefill", "none")
    if options["prefill"] != "none" and options.get("decode") == "none":
        options.pop("decode_sizes")
    plan = CaptureOptions(**options).resolve("dry" if device is None or device.name == "dry" else "cuda", mode, 64)
    if mode in ("none", "stock"):
        source = model_source(model, example or inputs(4), dynamic, 64, mode=mode)
    else:
        source = program_source(program or compiled(model))
    arguments.setdefault("owners", {"": model})
    return capture(source, plan, device or DryDevice(), observer=observer, **arguments)


__all__ = ["DYNAMIC", "Recorder", "Toy", "captured", "compiled", "inputs", "operator", "toy"]
