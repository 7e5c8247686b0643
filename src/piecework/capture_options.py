"""What a caller may choose of capture, under our names and under those that users of other engines know.

`None` means "not given"; `resolve` returns a complete plan. An option that has no meaning beside the others is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from piecework.choices import by_name, near, one_of, sizes, text, truth, whole
from piecework.errors import OptionError
from piecework.values.ladder import Rung, ladder
from piecework.values.phases import (
    BREAKABLE,
    CAPTURES,
    DECODE,
    FULL,
    NONE,
    PHASES,
    PIECEWISE,
    PREFILL,
    CapturePlan,
    PhaseCapture,
    WholeForward,
    check_legal,
    default_capture,
)

MOMENTS = ("startup", "first_use", "idle")
RESULTS = ("copied", "borrowed")
DECODE_MAXIMUM, PREFILL_MAXIMUM, WHOLE_FORWARD_MAXIMUM = 256, 2048, 32


def _option(default: Any, text: str) -> Any:
    # Nothing here enters a key: what is captured changes no artifact.
    return field(default=default, metadata={"keyed": False, "text": text})


@by_name
@dataclass(frozen=True)
class CaptureOptions:
    """How a program is captured. What is left `None` follows from the platform and the mode."""

    decode: str | None = _option(None, "none, full, piecewise or breakable, for steps of one length for all sequences")
    prefill: str | None = _option(None, "none, full, piecewise or breakable, for all other steps")
    decode_max: int | None = _option(None, "largest decode size that is captured")
    prefill_max: int | None = _option(None, "largest prefill size that is captured")
    decode_sizes: tuple[int, ...] | None = _option(None, "the decode sizes to capture, instead of a ladder")
    prefill_sizes: tuple[int, ...] | None = _option(None, "the prefill sizes to capture, instead of a ladder")
    decode_compiler: str | None = _option(None, "what compiles the program that decode is captured of")
    prefill_compiler: str | None = _option(None, "what compiles the program that prefill is captured of")
    tokens_per_sequence: int | None = _option(None, "tokens of a sequence in a decode step; above 1 to verify drafts")
    lower: bool | None = _option(None, "capture piecewise, instead of refusing, where an op may not be in a full graph")
    whole_forward_max: int | None = _option(None, "compile the whole forward for each decode size up to this; 0 = off")
    whole_forward_mode: str | None = _option(None, "the compiler's mode for these")
    check_addresses: bool | None = _option(None, "look for moved weights and caches before a result is handed out")
    memory_budget_bytes: int | None = _option(
        None, "bytes that all graphs may take; sizes beyond are named; 0 = no limit"
    )
    when: str | None = _option(None, "startup, first_use or idle: when sizes are captured")
    results: str | None = _option(None, "copied: the caller's own; borrowed: valid until the next step, and checked")

    def __post_init__(self) -> None:
        for known, names in ((CAPTURES, ("decode", "prefill")), (MOMENTS, ("when",)), (RESULTS, ("results",))):
            for name in names:
                if getattr(self, name) is not None:
                    one_of(name, getattr(self, name), known)
        for name, least in (
            ("decode_max", 1), ("prefill_max", 1), ("tokens_per_sequence", 1), ("whole_forward_max", 0),
            ("memory_budget_bytes", 0),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least)
        for name in ("lower", "check_addresses"):
            if getattr(self, name) is not None:
                truth(name, getattr(self, name))
        for name in ("decode_compiler", "prefill_compiler", "whole_forward_mode"):
            if getattr(self, name) is not None:
                text(name, getattr(self, name), "its name")
        for name in ("decode_sizes", "prefill_sizes"):
            object.__setattr__(self, name, _sizes(name, getattr(self, name)))

    def resolve(self, platform: str, mode: str, largest: int, rule: str = "") -> CapturePlan:
        """Return the plan for a platform and a mode, no size above `largest`, or raise OptionError with the reason.

        `rule` is what the optimisation level says of capture.
        """
        defaults = default_capture(platform, mode, rule)
        decode = self._phase(DECODE, defaults[DECODE], platform, mode, largest, DECODE_MAXIMUM)
        prefill = self._phase(PREFILL, defaults[PREFILL], platform, mode, largest, PREFILL_MAXIMUM)
        whole = WholeForward(self.whole_forward_max or 0, self.whole_forward_mode or WholeForward().compiler_mode)
        self._refuse_meaningless(decode, prefill, whole)
        return CapturePlan(
            decode=decode,
            prefill=prefill,
            whole_forward=whole,
            is_lowering_allowed=bool(self.lower),
            checks_addresses=self.check_addresses is not False,
            memory_budget_bytes=self.memory_budget_bytes or 0,
            when=self.when or "startup",
            results=self.results or "copied",
        )

    def _phase(
        self, phase: str, default: tuple[str, str], platform: str, mode: str, largest: int, usual: int
    ) -> PhaseCapture:
        asked = getattr(self, phase)
        capture, reason = (asked, "asked for") if asked is not None else default
        if capture != NONE and platform not in ("cuda", "dry"):
            raise OptionError(
                f"{phase} cannot be captured `{capture}` on `{platform}`: there are no CUDA graphs",
                hint=f"leave `{phase}` out, or give `none`",
            )
        check_legal(mode, capture, phase)
        q = self.tokens_per_sequence or 1 if phase == DECODE else 1
        rungs = self._rungs(phase, largest, usual) if capture != NONE else ()
        compiler = getattr(self, f"{phase}_compiler") or ""
        return PhaseCapture(phase, capture, rungs, q, compiler, reason)

    def _rungs(self, phase: str, largest: int, usual: int) -> tuple[Rung, ...]:
        sizes, most = getattr(self, f"{phase}_sizes"), getattr(self, f"{phase}_max")
        maximum = most if most is not None else max(sizes) if sizes else min(usual, largest)
        if maximum > largest:
            raise OptionError(
                f"{phase} size `{maximum}` is larger than the `{largest}` tokens that the program serves",
                hint="raise max_num_batched_tokens, or capture smaller sizes",
            )
        return ladder(maximum, sizes or ())

    def _refuse_meaningless(self, decode: PhaseCapture, prefill: PhaseCapture, whole: WholeForward) -> None:
        for phase in (decode, prefill):
            given = [
                n
                for n in (f"{phase.phase}_max", f"{phase.phase}_sizes", f"{phase.phase}_compiler")
                if getattr(self, n) is not None
            ]
            if given and not phase.is_captured:
                _refuse(given[0], f"{phase.phase} is not captured ({phase.reason})")
        if self.tokens_per_sequence is not None and not decode.is_captured:
            _refuse("tokens_per_sequence", f"decode is not captured ({decode.reason})")
        if whole.maximum and decode.capture != FULL:
            _refuse(
                "whole_forward_max",
                f"decode is captured `{decode.capture}`, and only a full graph holds a whole forward",
            )
        if self.whole_forward_mode is not None and not whole.maximum:
            _refuse("whole_forward_mode", "`whole_forward_max` is 0")
        if self.lower is not None and FULL not in (decode.capture, prefill.capture):
            _refuse("lower", "nothing is captured `full`")
        if not decode.is_captured and not prefill.is_captured:
            for name in ("check_addresses", "memory_budget_bytes", "when", "results"):
                if getattr(self, name) is not None:
                    _refuse(name, "nothing is captured")


def _refuse(name: str, why: str) -> None:
    raise OptionError(f"`{name}` has no meaning here: {why}", hint=f"leave `{name}` out", facts={"option": name})


def _sizes(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    found = sizes(name, value)
    if not found:
        raise OptionError(f"`{name}` is `{value!r}`", hint="give some sizes, as in (1, 2, 4, 8)")
    return found


# ------------------------------------------------------------------------------------- names of other engines

CUDAGRAPH_MODES: Mapping[str, Mapping[str, str]] = {
    "NONE": {"decode": NONE, "prefill": NONE},
    "PIECEWISE": {"decode": PIECEWISE, "prefill": PIECEWISE},
    "FULL": {"decode": FULL, "prefill": FULL},
    "FULL_DECODE_ONLY": {"decode": FULL, "prefill": NONE},
    "FULL_AND_PIECEWISE": {"decode": FULL, "prefill": PIECEWISE},
}
BACKENDS: Mapping[str, str] = {"disabled": NONE, "full": FULL, "breakable": BREAKABLE, "tc_piecewise": PIECEWISE}
FAMILIAR = (
    "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "enforce_eager", "disable_cuda_graph",
    "cuda_graph_backend_decode", "cuda_graph_backend_prefill", "cuda_graph_bs_decode", "cuda_graph_bs_prefill",
    "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill", "cuda_graph_tc_compiler", "enable_torch_compile",
    "torch_compile_max_bs",
)  # fmt: skip


def from_familiar(given: Mapping[str, Any], base: CaptureOptions | None = None) -> CaptureOptions:
    """Translate the capture options of other engines; contradictions and names without a meaning are errors.

    `enforce_eager` turns all capture off; what compiles is not said here.
    """
    unknown = [name for name in given if name not in FAMILIAR]
    if unknown:
        raise OptionError(f"capture option `{unknown[0]}` is unknown", hint=near(unknown[0], FAMILIAR))
    found: dict[str, tuple[Any, str]] = {}

    def put(name: str, value: Any, source: str) -> None:
        known = found.setdefault(name, (value, source))
        if known[0] != value:
            raise OptionError(
                f"`{source}` and `{known[1]}` contradict each other about `{name}`", hint="give one of the two"
            )

    for name in FAMILIAR:
        if name in given:
            _translate(name, given[name], given, put)
    return replace(base or CaptureOptions(), **{name: value for name, (value, _) in found.items()})


def _translate(name: str, value: Any, given: Mapping[str, Any], put: Any) -> None:
    if name == "cudagraph_mode":
        mode = str(value).upper()
        if mode not in CUDAGRAPH_MODES:
            raise OptionError(f"`{name}` is `{value}`", hint=near(mode, tuple(CUDAGRAPH_MODES)))
        for phase, capture in CUDAGRAPH_MODES[mode].items():
            put(phase, capture, f"{name}={mode}")
    elif name in ("enforce_eager", "disable_cuda_graph"):
        for phase in PHASES if value else ():
            put(phase, NONE, name)
    elif name.startswith("cuda_graph_backend_"):
        if value not in BACKENDS:
            raise OptionError(f"`{name}` is `{value}`", hint=near(str(value), tuple(BACKENDS)))
        put(name.rpartition("_")[2], BACKENDS[value], f"{name}={value}")
    elif name == "cuda_graph_tc_compiler":
        if given.get("cuda_graph_backend_prefill") != "tc_piecewise":
            _refuse(name, "`cuda_graph_backend_prefill` is not `tc_piecewise`")
        put("prefill_compiler", value, name)
    elif name == "enable_torch_compile":
        put("whole_forward_max", int(given.get("torch_compile_max_bs", WHOLE_FORWARD_MAXIMUM)) if value else 0, name)
    elif name == "torch_compile_max_bs":
        if not given.get("enable_torch_compile"):
            _refuse(name, "`enable_torch_compile` is not given")
    elif name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        for phase in _phases_of_sizes(given):
            put(f"{phase}_{'sizes' if name == 'cudagraph_capture_sizes' else 'max'}", _plain(value), name)
    else:
        phase = name.rpartition("_")[2]
        put(f"{phase}_{'max' if '_max_' in name else 'sizes'}", _plain(value), name)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _turns_off(phase: str, given: Mapping[str, Any]) -> bool:
    mode = CUDAGRAPH_MODES.get(str(given.get("cudagraph_mode", "")).upper(), {})
    return NONE in (BACKENDS.get(str(given.get(f"cuda_graph_backend_{phase}"))), mode.get(phase))


def _phases_of_sizes(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Sizes given for both phases mean the one that is left on; where both are off, sizes are refused later."""
    return tuple(phase for phase in PHASES if not _turns_off(phase, given)) or PHASES


def describe_options() -> list[tuple[str, str]]:
    """Return every option's name with what it says, for help pages."""
    return [(f.name, f.metadata["text"]) for f in fields(CaptureOptions)]
