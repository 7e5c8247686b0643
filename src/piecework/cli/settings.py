"""What a command runs with: every option's value, and where it came from.

From weak to strong: the default, the level's table, the environment, `--compilation-config`, `-cc.name=value`, the
option's own flag.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from piecework.cli.config import (
    own_name,
    own_names,
    parse_names,
    parse_numbers,
    parse_ranges,
    read_json,
    read_pair,
    told_as,
)
from piecework.cli.flags import CompileFlags, StoreFlags
from piecework.env import Environment
from piecework.errors import OptionError
from piecework.events import Observer
from piecework.options import NONE, CompileOptions, from_mapping
from piecework.store.protocol import KernelStore

DEFAULT, COMMAND_LINE = "default", "command line"
LEVEL_TABLE, OTHER = "level table", "other options"
DERIVED = (DEFAULT, LEVEL_TABLE, OTHER)  # how the origin of a value begins that nobody gave
TABLED = ("mode", "compiler", "passes", "ranges", "autotune")


@dataclass(frozen=True)
class Settings:
    """The complete options of a command; `origins` says of each, and of the store's, where its value came from."""

    options: CompileOptions
    store: StoreFlags
    origins: Mapping[str, str]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return every option with its value, its origin, and whether it is part of the key."""
        found = {}
        for each in fields(CompileOptions):
            value = getattr(self.options, each.name)
            shown = f"{value.__module__}:{value.__qualname__}" if callable(value) else value
            found[each.name] = {"value": shown, "origin": self.origins[each.name], "keyed": each.metadata["keyed"]}
        for name in STORE_OPTIONS:
            found[name] = {"value": getattr(self.store, name), "origin": self.origins[name], "keyed": False}
        return found


STORE_OPTIONS = ("store", "store_read_only", "store_write_only", "trust", "trusted_keys")


def gather(compile_flags: CompileFlags, store_flags: StoreFlags, environment: Environment) -> Settings:
    """Join flags, configuration, environment and tables; raise OptionError for whatever does not fit together."""
    values: dict[str, Any] = {}
    origins = {each.name: DEFAULT for each in fields(CompileOptions)}

    typed: dict[str, str] = {}

    def give(given: Mapping[str, Any], origin: Callable[[str], str], names: Mapping[str, str]) -> None:
        for name, value in given.items():  # one by one, so that an error is told of what was typed
            typed[name] = names.get(name, name)
            with told_as({name: typed[name]}):
                from_mapping({name: value})
        values.update(given)
        origins.update({name: origin(name) for name in given})

    if environment.strict:
        give({"strict": True}, lambda name: "environment PIECEWORK_STRICT", {})
    maximum = _maximum(compile_flags)
    for text in compile_flags.compilation_config or []:
        config = read_json(text, "--compilation-config")
        names = {own_name(name): name for name in config}
        give(own_names(config, maximum), lambda name: "config --compilation-config", names)
    for text in compile_flags.compilation_pair or []:
        name, value = read_pair(text)
        pair = own_names({name: value}, maximum, "-cc.")
        give(pair, lambda name: f"config -cc.{name}", {own_name(name): f"-cc.{name}"})
    given = _given(compile_flags, maximum)
    if store_flags.strict is not None:
        given["strict"] = store_flags.strict
    flags = {name: f"--{name.replace('_', '-')}" for name in given}
    give(given, lambda name: f"{COMMAND_LINE} {flags[name]}", flags)
    if compile_flags.enforce_eager:
        if values.get("mode", NONE) != NONE:
            raise OptionError(
                f"`--enforce-eager` and mode `{values['mode']}` contradict each other", hint="give one of the two"
            )
        eager = {"mode": NONE, "optimization_level": 0}
        give(eager, lambda name: f"{COMMAND_LINE} --enforce-eager", dict.fromkeys(eager, "--enforce-eager"))
    with told_as(typed):
        options = from_mapping(values)
    complete = options.resolve()
    for name in (each.name for each in fields(options)):
        if getattr(options, name) != getattr(complete, name):
            origins[name] = f"{LEVEL_TABLE} -O{options.optimization_level}" if name in TABLED else OTHER
    store, store_origins = _store(store_flags, environment)
    return Settings(complete, store, {**origins, **store_origins})


def _maximum(flags: CompileFlags) -> int:
    """Return the largest size, which closes ranges that are given by their endpoints."""
    if flags.max_num_batched_tokens is not None:
        return flags.max_num_batched_tokens
    found = CompileOptions().max_num_batched_tokens
    for text in flags.compilation_config or []:
        found = read_json(text, "--compilation-config").get("max_num_batched_tokens", found)
    for text in flags.compilation_pair or []:
        name, value = read_pair(text)
        found = value if name == "max_num_batched_tokens" else found
    return found if type(found) is int and found > 0 else 1  # what is none is told where it is given


def _given(flags: CompileFlags, maximum: int) -> dict[str, Any]:
    """Return what the options' own flags say."""
    read: dict[str, Callable[[Any], Any]] = {
        "optimization_level": int,
        "mode": str,
        "compiler": str,
        "max_num_batched_tokens": int,
        "ranges": lambda text: parse_ranges(text, maximum),
        "single_sizes": lambda text: parse_numbers(text, "--single-sizes"),
        "autotune": bool,
        "passes": parse_names,
        "custom_ops": parse_names,
        "split_ops": parse_names,
        "split_ops_only": parse_names,
        "partition": str,
        "tensor_parallel_size": int,
    }
    return {name: turn(value) for name, turn in read.items() if (value := getattr(flags, name)) is not None}


def _store(flags: StoreFlags, environment: Environment) -> tuple[StoreFlags, dict[str, str]]:
    """Return the store's own options with nothing left open, and where each came from."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    variables = {
        "store": "PIECEWORK_STORE",
        "store_read_only": "PIECEWORK_STORE_READ_ONLY",
        "store_write_only": "PIECEWORK_STORE_WRITE_ONLY",
        "trust": "PIECEWORK_TRUST",
        "trusted_keys": "PIECEWORK_TRUSTED_KEYS",
    }
    defaults = {"store": "", "store_read_only": False, "store_write_only": False, "trust": "own", "trusted_keys": ""}
    for name, variable in variables.items():
        flag, found = getattr(flags, name), getattr(environment, name)
        if flag is not None:
            values[name], origins[name] = flag, f"{COMMAND_LINE} --{name.replace('_', '-')}"
        elif found:
            values[name], origins[name] = found, f"environment {variable}"
        else:
            values[name], origins[name] = defaults[name], DEFAULT
    values["trusted_keys"] = str(keys_file(flags, environment))
    if not values["store"]:
        from piecework.store.layout import default_folder

        values["store"] = str(default_folder(environment.xdg_cache_home, environment.home))
    if values["store_read_only"] and values["store_write_only"]:
        raise OptionError(
            "`--store-read-only` and `--store-write-only` contradict each other",
            hint="give one of them; to use no store at all, give `--store memory`",
        )
    return StoreFlags(**values, strict=flags.strict), origins


def open_store(settings: Settings, observer: Observer) -> KernelStore:
    """Open the store that the settings name."""
    from piecework.store.disk import DiskStore
    from piecework.store.layout import default_folder, is_remote, remote_folder
    from piecework.store.memory import MemoryStore
    from piecework.values.faults import CHECKS

    flags = settings.store
    if flags.store == "memory":
        return MemoryStore(observer=observer)
    place = str(flags.store)
    if is_remote(place):
        environment = Environment.read()
        place = str(remote_folder(place, default_folder(environment.xdg_cache_home, environment.home)))
    local = DiskStore(
        place,
        read_only=bool(flags.store_read_only),
        write_only=bool(flags.store_write_only),
        strict=settings.options.strict,
        trust=_trust(str(flags.trust), Path(str(flags.trusted_keys))),
        checks=CHECKS,
        observer=observer,
        record_uses=True,
    )
    if not is_remote(str(flags.store)):
        return local
    from piecework.store.link import Link
    from piecework.store.remote import RemoteStore

    return RemoteStore(local, Link(str(flags.store), observer=observer), observer=observer)


def keys_file(flags: StoreFlags, environment: Environment) -> Path:
    """Return the file of believed keys: the one that is named, else the user's own."""
    named = flags.trusted_keys or environment.trusted_keys
    if named:
        return Path(named)
    if os.path.isabs(environment.xdg_config_home):
        return Path(environment.xdg_config_home, "piecework", "trusted_keys")
    return Path(environment.home or ".", ".config", "piecework", "trusted_keys")


def _trust(policy: str, keys: Path) -> Any:
    from piecework.store.trust import ANY, OWN, POLICIES, AnyFiles, OwnFiles

    if policy == OWN:
        return OwnFiles()
    if policy == ANY:
        return AnyFiles()
    if policy not in POLICIES:
        raise OptionError(f"trust `{policy}` is unknown", hint=f"known are {', '.join(POLICIES)}")
    if not keys.is_file():
        raise OptionError(
            f"trust `signed` needs keys to believe, and `{keys}` is not there",
            hint="`piecework store trust FILE.pub` adds a key to it, or name another file with `--trusted-keys FILE`",
        )
    from piecework.store.keys import read_trusted
    from piecework.store.signing import SignedRecords

    return SignedRecords(read_trusted(keys))
