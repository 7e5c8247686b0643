"""What a caller may choose: frozen, validated when made; every field says whether it enters keys.

`None` means "not given"; `resolve` returns a complete new value in which nothing is left to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from piecework.choices import by_name, many, near, operators, ranges, seconds, sizes, text, texts, truth, whole
from piecework.errors import OptionError

NONE, STOCK, TRACE_ONCE, PIECEWISE = "none", "stock", "trace_once", "piecewise"
# What runs over the graph from -O2 on, in this order; `piecework.passes` holds them.
DEFAULT_PASSES: tuple[str, ...] = ()
MODES = (NONE, STOCK, TRACE_ONCE, PIECEWISE)
BASES = ("all", "none")  # of `custom_ops`
PARTITIONS = FX, BY_COMPILER, UNCUT = ("fx", "inductor", "none")
COMPILERS = ("eager", "aot_eager", "inductor")
BY_PHASE = "by phase"  # decode full, prefill as the mode allows
ONE_RANGE = ((1, 8192),)
DEFAULT_RANGES = ((1, 64), (65, 8192))
MANY_RANGES = ((1, 16), (17, 64), (65, 512), (513, 8192))
MOST_TOKENS = 1 << 22  # a program looks its range up in a table with a row for every size
MOST_THREADS = 1024


def _option(default: Any, *, keyed: bool, text: str) -> Any:
    return field(default=default, metadata={"keyed": keyed, "text": text})


@by_name
@dataclass(frozen=True)
class CompileOptions:
    """How a model is compiled. Fields left `None` are filled in from the optimisation level's table."""

    mode: str | int | None = _option(None, keyed=True, text="none, stock, trace_once or piecewise; or 0 to 3")
    compiler: Any = _option(
        None,
        keyed=True,
        text="eager, aot_eager, inductor, a callable (graph module, inputs) -> callable, or a compiler as an object",
    )
    max_num_batched_tokens: int = _option(8192, keyed=True, text="largest size that a program serves")
    ranges: tuple[tuple[int, int], ...] | None = _option(
        None, keyed=True, text="token counts that share an artifact; clipped to the maximum"
    )
    single_sizes: tuple[int, ...] = _option(
        (), keyed=True, text="sizes that get an artifact of their own, beside size 1"
    )
    size_one: bool = _option(
        True, keyed=True, text="serve size 1 by an artifact of its own; without it programs start at 2"
    )
    split_ops: tuple[str, ...] = _option(
        (), keyed=True, text="operators to cut at, beside those declared with split_op"
    )
    split_ops_only: tuple[str, ...] | None = _option(
        None, keyed=True, text="the whole list of operators to cut at; empty = the whole graph"
    )
    partition: str = _option(
        FX, keyed=True, text="where the graph is cut: fx, before compiling; inductor, in what that made; none, nowhere"
    )
    split_at_guards: bool = _option(
        True, keyed=True, text="trace anew on each side of a size at which the model branches; without it an error"
    )
    passes: tuple[Any, ...] | None = _option(
        None, keyed=True, text="passes over the graph in their order: names, or what `graph_pass` made of a function"
    )
    evaluate_guards: bool = _option(
        False, keyed=True, text="debugging: prove no guard on sizes; torch evaluates them before each call"
    )
    autotune: bool | None = _option(
        None, keyed=True, text="let the compiler time several kernels while it builds, and keep the fastest"
    )
    custom_ops: tuple[str, ...] = _option(
        (), keyed=True, text="all or none, then +op, -op; none where Inductor compiles and neither is given, else all"
    )
    merge_consecutive: bool = _option(True, keyed=True, text="keep consecutive opaque calls in one region")
    tensor_parallel_size: int = _option(1, keyed=True, text="how many ranks share a model folder's weights and heads")
    optimization_level: int = _option(
        2, keyed=False, text="-O0 to -O3: which table of defaults fills what is not given"
    )
    lazy_sizes: tuple[int, ...] = _option(
        (), keyed=False, text="sizes compiled when first met, beside the steps; the range's artifact serves till then"
    )
    strict: bool = _option(False, keyed=False, text="a damaged store entry is an error instead of a miss")
    compile_budget_s: float = _option(0.0, keyed=False, text="a piece that takes longer runs eager; 0 = no limit")
    verify: bool = _option(
        True, keyed=False, text="run each new artifact beside eager before it serves; what fails runs eager"
    )
    drift_every: int = _option(0, keyed=False, text="run one step in so many through eager too and compare; 0 = none")
    compile_threads: int = _option(4, keyed=False, text="pieces compiled at a time")
    debug_folder: str = _option("", keyed=False, text="where computation_graph.py and dumps are written")

    def __post_init__(self) -> None:
        self._put("mode", _mode(self.mode))
        if self.ranges is not None:
            self._put("ranges", ranges("ranges", self.ranges))
        for name in ("single_sizes", "lazy_sizes"):
            self._put(name, sizes(name, getattr(self, name)))
        self._put("split_ops", operators("split_ops", self.split_ops))
        if self.split_ops_only is not None:
            self._put("split_ops_only", operators("split_ops_only", self.split_ops_only))
        if self.passes is not None:
            self._put("passes", _passes(self.passes))
        self._put("custom_ops", _custom_ops(self.custom_ops))
        self._put("debug_folder", text("debug_folder", self.debug_folder, "a path"))
        _check_compiler(self.compiler)
        if self.partition not in PARTITIONS:
            raise OptionError(f"partition `{self.partition}` is unknown", hint=near(str(self.partition), PARTITIONS))
        whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, MOST_TOKENS)
        whole("compile_threads", self.compile_threads, 1, MOST_THREADS)
        for name, least in (("optimization_level", 0), ("drift_every", 0), ("tensor_parallel_size", 1)):
            whole(name, getattr(self, name), least)
        if self.optimization_level > 3:
            raise OptionError(f"optimization level `{self.optimization_level}` is unknown", hint="use 0, 1, 2 or 3")
        for name in (each.name for each in fields(self) if isinstance(each.default, bool)):
            truth(name, getattr(self, name))
        if self.autotune is not None:
            truth("autotune", self.autotune)
        seconds("compile_budget_s", self.compile_budget_s, "give seconds, or 0 for no limit")
        self._refuse_contradictions()

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refuse_contradictions(self) -> None:
        if self.split_ops and self.split_ops_only is not None:
            raise OptionError(
                "`split_ops` and `split_ops_only` are both given",
                hint="split_ops adds to what is declared, split_ops_only replaces it: give one",
            )
        for name in ("mode",) * (self.mode == TRACE_ONCE) + ("merge_consecutive",) * (not self.merge_consecutive):
            if self.partition == BY_COMPILER or (self.partition == UNCUT and name == "mode"):
                what = f"`partition` is `{self.partition}` and `{name}` is `{getattr(self, name)}`, which contradict"
                raise OptionError(what, hint=f"leave `{name}` out, or give partition `{FX}`")
        if self.evaluate_guards and self.mode in (NONE, STOCK):
            what = f"`evaluate_guards` has no meaning in mode `{self.mode}`, which has no trace"
            raise OptionError(what, hint="evaluate guards in mode piecewise or trace_once")

    def resolve(self) -> CompileOptions:
        """Return the options with every `None` replaced from the level's table."""
        table = LEVELS[self.optimization_level]
        ranges = self.ranges
        if ranges is None:
            ranges = table["ranges"]
            if self.max_num_batched_tokens > ranges[-1][1]:
                ranges = (*ranges[:-1], (ranges[-1][0], self.max_num_batched_tokens))
        compiler = self.compiler or table["compiler"]
        has_base = any(word in BASES for word in self.custom_ops)
        base = () if has_base else (BASES[getattr(compiler, "name", compiler) == "inductor"],)
        return replace(
            self,
            mode=self.mode or table["mode"],
            compiler=compiler,
            custom_ops=(*base, *self.custom_ops),
            passes=table["passes"] if self.passes is None else self.passes,
            autotune=table["autotune"] if self.autotune is None else self.autotune,
            ranges=ranges,
        )

    @property
    def capture_rule(self) -> str:
        """What the level says of capture where nothing is asked for: one capture for both phases, or by phase."""
        return str(LEVELS[self.optimization_level]["capture"])

    def keyed(self) -> dict[str, Any]:
        """Return the fields that enter keys, as plain data."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.metadata["keyed"]}


LEVELS: dict[int, dict[str, Any]] = {
    0: {
        "mode": NONE,
        "compiler": "eager",
        "capture": "none",
        "passes": (),
        "ranges": DEFAULT_RANGES,
        "autotune": False,
    },
    1: {
        "mode": PIECEWISE,
        "compiler": "inductor",
        "capture": "piecewise",
        "passes": (),
        "ranges": ONE_RANGE,
        "autotune": False,
    },
    2: {
        "mode": PIECEWISE,
        "compiler": "inductor",
        "capture": BY_PHASE,
        "passes": DEFAULT_PASSES,
        "ranges": DEFAULT_RANGES,
        "autotune": False,
    },
    3: {
        "mode": PIECEWISE,
        "compiler": "inductor",
        "capture": BY_PHASE,
        "passes": DEFAULT_PASSES,
        "ranges": MANY_RANGES,
        "autotune": True,
    },
}


def from_mapping(given: Mapping[str, Any], base: CompileOptions | None = None) -> CompileOptions:
    """Build options from parsed JSON or command-line pairs; an unknown name is an error with the nearest one."""
    return replace(base or CompileOptions(), **given)


def _mode(mode: str | int | None) -> str | None:
    if mode is None:
        return None
    if isinstance(mode, int) and not isinstance(mode, bool) and 0 <= mode < len(MODES):
        return MODES[mode]
    text = str(mode)
    if text.isdigit() and int(text) < len(MODES):
        return MODES[int(text)]
    if text not in MODES:
        hint = f"{near(text, MODES)}; or their numbers, 0 to {len(MODES) - 1}"
        raise OptionError(f"mode `{mode}` is unknown", hint=hint, facts={"name": "mode"})
    return text


def _check_compiler(compiler: Any) -> None:
    if isinstance(compiler, str) and compiler not in COMPILERS:
        raise OptionError(f"compiler `{compiler}` is unknown", hint=near(compiler, COMPILERS))
    if not (isinstance(compiler, str | None) or _is_compiler(compiler) or callable(compiler)):
        raise OptionError(f"compiler `{compiler!r}` is no name and no callable", hint=near("", COMPILERS))


def _passes(passes: Any) -> tuple[Any, ...]:
    hint = "give a tuple of names, or of functions declared with `piecework.graph_pass`"
    found = many(passes)
    if found is None:
        raise OptionError(f"`passes` is `{passes!r}`", hint=hint)
    for one in found:
        is_pass = all(hasattr(one, name) for name in ("function", "name", "version", "runs_on"))
        if not (is_pass or (isinstance(one, str) and one)):
            raise OptionError(f"`passes` holds `{one!r}`, which is no pass", hint=hint)
    return found


def _custom_ops(words: Any) -> tuple[str, ...]:
    found = texts("custom_ops", words, "all")
    bases = [word for word in found if word in BASES]
    if len(bases) > 1:
        raise OptionError(
            f"`custom_ops` holds the base modes {' and '.join(f'`{word}`' for word in bases)}",
            hint="give exactly one of `all` and `none`, then `+op` and `-op` for single operators",
        )
    for word in found:
        if word not in BASES and (len(word) < 2 or word[0] not in "+-"):
            raise OptionError(
                f"`custom_ops` holds `{word}`", hint="give `all` or `none`, and `+op` or `-op` for single operators"
            )
        if word[0] == "+" and f"-{word[1:]}" in found:
            raise OptionError(f"`custom_ops` holds `{word}` and `-{word[1:]}`", hint="an operator is on or off")
    return found


def _is_compiler(value: Any) -> bool:
    """Tell whether a value is a compiler as an object: it compiles, and says what enters its artifacts' keys."""
    return all(hasattr(value, name) for name in ("compile", "name", "version")) and not isinstance(value, type)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if _is_compiler(value) or hasattr(value, "runs_on"):
        return str(value.name)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
