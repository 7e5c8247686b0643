"""pw.compile and pw.load: a model given as an object, a program given by its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from piecework.api.drift import watch_drift
from piecework.api.given import (
    check_bodies,
    check_example,
    check_key,
    check_model,
    check_options,
    check_store,
    check_weights,
    refuse_ranks,
)
from piecework.api.identity import describe_model, newest_of_folder
from piecework.api.lazy import on_demand
from piecework.api.live import evaluate_guards, refuse_direct, refuse_unbacked
from piecework.api.stores import default_store, report_to_log
from piecework.api.whole import whole_forward
from piecework.engine.requests import request_for
from piecework.env import read_variables
from piecework.errors import OptionError
from piecework.events import Observer, Ready, phase
from piecework.models.weight_files import Hear, unheard
from piecework.models.weights import Expected, load_weights
from piecework.options import NONE, STOCK, CompileOptions
from piecework.pipeline import Request, Source, bind_record, compile_model
from piecework.runtime.lazy_sizes import OnDemand
from piecework.runtime.program import Program
from piecework.runtime.variants import join_variants
from piecework.seam.surroundings import refuse_autocast, variables
from piecework.stages.find import read_program, tell_fall_backs, with_siblings
from piecework.store.protocol import KernelStore
from piecework.values.arguments import (
    bind_arguments,
    declared_dynamic,
    describe_pattern,
    dynamic_leaves,
    symbol_sources,
)
from piecework.values.attributes import plain_tensors
from piecework.values.declaration import Dynamic
from piecework.values.packing import part_specs
from piecework.values.placement import ALONE, Placement
from piecework.values.record import Record
from piecework.values.signature import TensorSpec, parse_spec

Bodies = Mapping[str, Callable[..., Any]]
Example = Sequence[Any] | Mapping[str, Any]


def compile(
    model: torch.nn.Module,
    example_inputs: Example | list[Example],
    *,
    dynamic: Dynamic | None = None,
    options: CompileOptions | None = None,
    store: KernelStore | None = None,
    observer: Observer | None = None,
    ops: Bodies | None = None,
) -> Program:
    """Compile a model for the presence pattern of `example_inputs`, or find it compiled in the store.

    `example_inputs` are forward's arguments as a tuple or a dictionary, or a list of those: then there is a
    variant for each, and a call's arguments choose. `dynamic` says which dimensions vary and overrides what
    `@compilable` declared. Without a store the platform's cache folder is used. The program reads the model's
    own weights.

    Raises TraceError, GuardError, SplitError, CompileError, OptionError, StoreError.
    """
    check_model(model)
    check_options(options)
    check_store(store)
    check_bodies(ops)
    examples = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if not examples:
        raise OptionError("`example_inputs` is an empty list", hint="give one example for each variant")
    for example in examples:
        check_example(example)
    settings = (options or CompileOptions()).resolve()
    refuse_ranks(settings.tensor_parallel_size)
    watch = observer or report_to_log
    if settings.mode in (NONE, STOCK):
        return _uncompiled(model, example_inputs, settings, watch)
    kept = store if store is not None else default_store(watch, strict=settings.strict)

    def program_for(example: Example) -> Program:
        request_with, start = partial(make_request, model, example, dynamic), starter(model, ops or {}, kept, watch)
        request = request_with(settings)
        program = start(request, on_demand(request, settings.lazy_sizes, kept, watch))
        evaluate_guards(program, request)
        program.whole_forward = whole_forward(settings, request_with, start)
        return watch_drift(program, ops or {}, kept, settings.drift_every, watch)

    programs = [program_for(example) for example in examples]
    watch(Ready(keys=tuple(program.key for program in programs)))
    return join_variants(programs)


def starter(model: torch.nn.Module, ops: Bodies, store: KernelStore, observer: Observer) -> Callable[..., Program]:
    """Return what makes a program of a request for a model, with the model's own weights."""

    def start(request: Request, lazy: OnDemand | None = None) -> Program:
        return compile_model(
            request, lambda: _own_weights(model), ops, store, observer, model=model, on_demand=lazy
        )

    return start


def make_request(
    model: torch.nn.Module,
    example: Sequence[Any] | Mapping[str, Any],
    dynamic: Dynamic | None,
    settings: CompileOptions,
) -> Request:
    """Return the request that compiles a model given as an object."""
    rules = declared_dynamic(model, dynamic)
    arguments = bind_arguments(model.forward, example)
    dims = dynamic_leaves(arguments, rules)
    device = _device_of(model, arguments)
    if settings.evaluate_guards:
        refuse_unbacked(symbol_sources(dims))
    refuse_autocast(device)
    return request_for(
        describe_model(model), describe_pattern(arguments, dims), lambda: Source(model, example, rules, device),
        settings, device, read_variables((*variables(device), "CXX")),
    )  # fmt: skip


def load(
    store: KernelStore,
    *,
    key: str | None = None,
    model_folder: str | Path | None = None,
    weights: str | Path | Mapping[str, torch.Tensor],
    ops: Bodies | Sequence[Callable[..., Any]] = (),
    observer: Observer | None = None,
) -> Program:
    """Bind a stored program to weights: no model object, no trace, no compiler.

    `key` is a program's key, or `model_folder` names the folder whose program is wanted. `weights` are a
    state dictionary, a `.safetensors` file, or a folder that holds some. `ops` gives bodies of opaque
    operators by name where they are not declared in this process.

    Raises ArtifactMissing, Incompatible, CorruptEntry, BindError.
    """
    watch = observer or report_to_log
    if (key is None) == (model_folder is None):
        raise OptionError("`load` takes either `key` or `model_folder`", hint="give one of the two")
    if key is not None:
        check_key(key)
    check_store(store, needed=True)
    check_weights(weights)
    check_bodies(ops)
    chosen = key if key is not None else newest_of_folder(str(model_folder), store)
    programs = []
    for one in chosen.split(","):
        record = read_program(one, store)
        refuse_direct(record.factors["config"]["options"], "a program that is loaded")
        with phase(watch, "weights"):
            found = read_weights(record, weights, with_siblings(record, store))
        tell_fall_backs(record, watch)
        programs.append(bind_record(one, record, found, _bodies(ops), store, watch))
    watch(Ready(keys=tuple(program.key for program in programs)))
    return join_variants(programs)


def read_weights(
    record: Record,
    source: str | Path | Mapping[str, torch.Tensor],
    every: Sequence[Record] = (),
    *,
    cast: bool = False,
    hear: Hear = unheard,
    placement: Placement = ALONE,
) -> dict[str, torch.Tensor]:
    """Read the weights that a record, or `every` record of a program, asks for, by name or by rule.

    With `cast`, floating weights come in the dtype that the record was made for, whatever the files hold.
    `hear` is told how much of them was read. Of a model that several ranks share, those of `placement` are read.
    """
    bindings = [b for one in every or (record,) for b in one.values.values()]
    wanted = [b for b in bindings if b["kind"] == "weight" or (b["kind"] == "buffer" and b["persistent"])]
    expected: dict[str, Expected] = {}
    for binding in wanted:
        one = _expected(binding["spec"])
        shapes = part_specs(binding) or {binding["name"]: one.shape}
        expected |= {name: Expected(shape, one.dtype) for name, shape in shapes.items()}
    names = expected if cast else tuple(expected)
    together = [tuple(part_specs(b)) for b in wanted if b.get("parts")]
    aliases = {alias: b["name"] for b in bindings for alias in b["aliases"]}
    rules: dict[str, Any] = dict(record.weight_rules)
    if isinstance(source, Mapping):
        rules |= {name: alias for alias, name in aliases.items() if name not in source and alias in source}
    return load_weights(
        source, names, rules=rules, device=record.device, together=together, hear=hear, placement=placement
    )


def _expected(spec: str) -> Expected:
    parsed = parse_spec(spec)
    assert isinstance(parsed, TensorSpec)
    return Expected(tuple(int(size) for size in parsed.shape), getattr(torch, parsed.dtype))


def _bodies(ops: Bodies | Sequence[Callable[..., Any]]) -> Bodies:
    if isinstance(ops, Mapping):
        return ops
    named = {}
    for op in ops:
        name = getattr(op, "_qualname", None) or getattr(op, "__piecework_name__", None)
        if not isinstance(name, str):
            raise OptionError(
                f"`ops` holds `{op!r}`, which does not say its operator's name",
                hint='give a dictionary {"namespace::name": body}',
            )
        named[name] = getattr(op, "_init_fn", op)
    return named


def _uncompiled(model: torch.nn.Module, example: Any, settings: CompileOptions, observer: Observer) -> Program:
    """Modes `none` and `stock`: the model itself, or torch's own compile of it, as a program."""
    call: Callable[..., Any] = model if settings.mode == NONE else stock_compile(model, observer)
    observer(Ready())
    return Program(call, key=f"mode={settings.mode}", source="", weights=_own_weights(model))


def stock_compile(model: torch.nn.Module, observer: Observer) -> Callable[..., Any]:
    """Return plain torch.compile of the model: torch keeps its guards; each recompile is an event."""
    from piecework.seam.stock import compile_stock

    return compile_stock(model, observer)


def _own_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor that a model holds, by qualified name: parameters, buffers and plain attributes."""
    tensors: dict[str, torch.Tensor] = dict(plain_tensors(model, torch.Tensor))
    tensors.update(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


def _device_of(model: torch.nn.Module, arguments: Mapping[str, Any]) -> str:
    first: torch.Tensor | None = next(iter(model.parameters()), None)
    if first is None:
        first = next((leaf for leaf in arguments.values() if isinstance(leaf, torch.Tensor)), None)
    return "cpu" if first is None or first.device.type == "meta" else first.device.type
