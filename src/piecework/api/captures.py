"""pw.capture: a program, or a model that was never traced, becomes a captured program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from piecework.api.programs import make_request, starter
from piecework.api.stores import default_store, report_to_log
from piecework.api.whole import whole_forward as compile_whole
from piecework.capture_options import CaptureOptions
from piecework.errors import OptionError
from piecework.events import Observer
from piecework.options import CompileOptions
from piecework.runtime.program import Program
from piecework.runtime.replay import CapturedProgram
from piecework.seam.cuda import CudaDevice
from piecework.seam.dry import DryDevice
from piecework.stages.capture import capture as capture_source
from piecework.stages.capture import model_source, program_source
from piecework.stages.capture.sources import Source
from piecework.store.protocol import KernelStore
from piecework.values.declaration import Dynamic
from piecework.values.device import Device
from piecework.values.phases import default_capture

DRY = "dry"
Whole = Callable[[int, str], Program]


def capture(
    target: Program | torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic | None = None,
    max_num_batched_tokens: int | None = None,
    options: CaptureOptions | None = None,
    device: str = "",
    owners: Mapping[str, Any] | None = None,
    steps: Callable[[str, int], Any] | None = None,
    phase_of: Callable[[], str] | None = None,
    fixed: Mapping[str, torch.Tensor] | None = None,
    whole_forward: Whole | None = None,
    store: KernelStore | None = None,
    observer: Observer | None = None,
) -> CapturedProgram:
    """Capture a program, or with example inputs a model as it is, and return the program that replays it.

    The device is that of the weights. `dry`, asked for by name, records on the CPU what a GPU would, for tests.
    `owners` name who holds tensors that graphs read, such as caches; the model is known without it. `steps` makes the
    worst-case step of a phase and a size, `phase_of` tells the phase of a call, `fixed` are inputs that are passed at
    one address in every call, `whole_forward` compiles the forward for one decode size, in the mode that it is told; by
    default what `pw.compile` made is compiled as it was, and a model by the default options into `store`.

    Raises CaptureError where capture fails, and OptionError where it has no meaning, each with the reason.
    """
    source = _source(target, example_inputs, dynamic, max_num_batched_tokens)
    platform = _platform(source, device)
    plan = (options or CaptureOptions()).resolve(platform, source.mode, source.largest)
    for phase in (plan.decode, plan.prefill):
        if phase.compiler:
            name = f"{phase.phase}_compiler"
            raise OptionError(
                f"`{name}` has no meaning here: what is captured was compiled already, or is not compiled",
                hint=f"leave `{name}` out, and compile by `{phase.compiler}` before: pw.compile(..., options)",
            )
    watch = observer or report_to_log
    mode = plan.whole_forward.compiler_mode
    compiles_model = not isinstance(target, Program) and whole_forward is None and plan.whole_forward.maximum > 0
    if store is not None and not compiles_model:
        raise OptionError(
            "`store` has no meaning here: it keeps the whole forward of a model that was never compiled",
            hint="leave `store` out",
        )
    whole = whole_forward
    if isinstance(target, Program):
        whole = whole or target.whole_forward
    elif compiles_model:
        whole = _whole_of(target, example_inputs, dynamic, store if store is not None else default_store(watch), watch)
    return capture_source(
        source,
        plan,
        _device(platform, source),
        owners=owners,
        steps=steps,
        phase_of=phase_of,
        fixed=fixed,
        whole_forward=None if whole is None else lambda size: program_source(whole(size, mode)),
        observer=watch,
    )


def _whole_of(
    model: torch.nn.Module, example: Any, dynamic: Dynamic | None, store: KernelStore, watch: Observer
) -> Whole:
    settings = CompileOptions().resolve()
    return compile_whole(settings, partial(make_request, model, example, dynamic), starter(model, {}, store, watch))


def _source(
    target: Program | torch.nn.Module,
    example: Sequence[Any] | Mapping[str, Any] | None,
    dynamic: Dynamic | None,
    largest: int | None,
) -> Source:
    given = {"example_inputs": example, "dynamic": dynamic, "max_num_batched_tokens": largest}
    if isinstance(target, Program):
        for name, value in given.items():
            if value is not None:
                raise OptionError(
                    f"`{name}` has no meaning for a program, which knows its own", hint=f"leave `{name}` out"
                )
        if target.evaluates_guards:
            raise OptionError(
                "a capture replays by direct dispatch, which evaluates no guards: `evaluate_guards` has no meaning",
                hint="compile the program without `evaluate_guards`, or call it uncaptured",
            )
        return program_source(target)
    for name in ("example_inputs", "max_num_batched_tokens"):
        if given[name] is None:
            raise OptionError(
                f"`{name}` is missing, and a model that was never traced does not tell it",
                hint=f"give `{name}`, or compile the model and capture the program",
            )
    assert example is not None and largest is not None
    return model_source(target, example, dynamic, largest)


def _platform(source: Source, device: str) -> str:
    """Return where graphs are recorded: the weights' own device, or the dry one where it is asked for by name."""
    own = source.device.type
    kind = device.partition(":")[0] or own
    if kind not in ("cuda", "cpu", DRY):
        raise OptionError(f"device `{device}` cannot record graphs", hint="leave `device` out, or give `dry` for tests")
    if kind == "cpu":
        _, reason = default_capture(kind, source.mode)["decode"]
        raise OptionError(reason, hint='put the model on `cuda`, or capture with device="dry" to test')
    if own != ("cpu" if kind == DRY else kind):
        raise OptionError(
            f"a program on `{own}` cannot be captured on `{kind}`", hint="leave `device` out: the weights tell it"
        )
    return kind


def _device(platform: str, source: Source) -> Device:
    # Kernels of compiled pieces go round the dispatcher, so a dry device records each piece as one call.
    return CudaDevice(source.device.index) if platform == "cuda" else DryDevice(by_call=True)
