"""Several compilable parts of one model (a vision encoder and a decoder), each a program with a record of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecework.api.programs import Bodies, compile
from piecework.api.stores import default_store, report_to_log
from piecework.errors import OptionError
from piecework.events import Event, Observer
from piecework.options import CompileOptions
from piecework.runtime.program import Program
from piecework.store.protocol import KernelStore
from piecework.values.declaration import Dynamic

Example = Sequence[Any] | Mapping[str, Any]
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")


@dataclass(frozen=True)
class CompiledParts(Mapping[str, Program]):
    """The programs of a model's parts by their paths; called, it runs the model with the programs in their places.

    `model` is that model: a module with the same weights under the same names as the one that was given, which stays
    as it was.
    """

    model: torch.nn.Module
    programs: Mapping[str, Program]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; each part is its program. Gradients are not computed, as in a program."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def __getitem__(self, path: str) -> Program:
        return self.programs[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)


def compile_parts(
    model: torch.nn.Module,
    examples: Mapping[str, Example],
    *,
    dynamic: Mapping[str, Dynamic] | None = None,
    options: CompileOptions | Mapping[str, CompileOptions] | None = None,
    store: KernelStore | None = None,
    observer: Observer | None = None,
    ops: Bodies | None = None,
) -> CompiledParts:
    """Compile parts of a model one by one, and return the model with programs in their places.

    `examples` maps the path of each part (`vision.encoder`) to what its forward is given. Dimensions are those that
    the part's class declares, or `dynamic` by path; `options` are one for all or by path. What lies between the parts
    runs as it is. Each part has a record of its own, and its events carry its path.

    Raises what `compile` raises, and OptionError for a path that is none.
    """
    parts = {path: _part(model, path) for path in examples}
    _refuse_nested(parts)
    for given in (dynamic or {}, options if isinstance(options, Mapping) else {}):
        for path in given:
            if path not in parts:
                raise OptionError(f"`{path}` is no part that has an example", hint=f"parts are {', '.join(parts)}")
    watch = observer or report_to_log
    kept = store if store is not None else default_store(watch)
    programs = {
        path: compile(
            part, examples[path], dynamic=(dynamic or {}).get(path), options=_options(options, path), store=kept,
            observer=_of_part(path, watch), ops=ops,
        )
        for path, part in parts.items()
    }  # fmt: skip
    return CompiledParts(_with_programs(model, parts, programs), programs)


def _part(model: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        part = model.get_submodule(path)
    except AttributeError as error:
        names = [name for name, _ in model.named_children()]
        raise OptionError(
            f"`{type(model).__name__}` has no part `{path}`", hint=f"its parts are {', '.join(names)}, and theirs"
        ) from error
    if part is model:
        raise OptionError("a part's path is empty", hint="the whole model is for `compile`")
    return part


def _refuse_nested(parts: Mapping[str, torch.nn.Module]) -> None:
    for outer in parts:
        inner = next((path for path in parts if path.startswith(f"{outer}.")), None)
        if inner is not None:
            raise OptionError(f"part `{inner}` lies inside part `{outer}`", hint="compile one of the two")


def _options(options: CompileOptions | Mapping[str, CompileOptions] | None, path: str) -> CompileOptions:
    """Return a part's options; what is written for a reader goes to a folder of the part's own."""
    own = options.get(path) if isinstance(options, Mapping) else options
    if own is None:
        return CompileOptions()
    return replace(own, debug_folder=f"{own.debug_folder}/{path}") if own.debug_folder else own


def _of_part(path: str, observer: Observer) -> Observer:
    def observe(event: Event) -> None:
        observer(replace(event, part=path))

    return observe


class ProgramModule(torch.nn.Module):
    """Stands where a part stood: its weights and attributes, and a program as its forward."""

    def __init__(self, part: torch.nn.Module, program: Program) -> None:
        super().__init__()
        ours = set(vars(self)) - set(_SHARED)
        vars(self).update({name: value for name, value in vars(part).items() if name not in ours})
        # Not registered: the names of weights stay what they are. Hooks of the part's own are in its program.
        vars(self).update(part=part, program=program)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return self.program(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["part"], name)


def _with_programs(
    model: torch.nn.Module, parts: Mapping[str, torch.nn.Module], programs: Mapping[str, Program]
) -> torch.nn.Module:
    """Copy the modules above the parts, and no others; wherever a part is found its program stands."""
    stand_ins = {id(part): ProgramModule(part, programs[path]) for path, part in parts.items()}
    copies: dict[str, torch.nn.Module] = {"": _own_copy(model)}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) not in stand_ins:
            continue
        *above, last = path.split(".")
        place, here = copies[""], ""
        for name in above:
            here = f"{here}.{name}" if here else name
            if here not in copies:
                copies[here] = place._modules[name] = _own_copy(place.get_submodule(name))
            place = copies[here]
        place._modules[last] = stand_ins[id(module)]
    return copies[""]


def _own_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module with a table of submodules of its own; the weights are the same."""
    made = copy.copy(module)
    vars(made)["_modules"] = dict(module._modules)
    return made
