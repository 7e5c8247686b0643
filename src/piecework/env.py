"""The one reader of environment variables, for api, cli and server alone.

Everything below them takes plain values. An empty variable counts as one that is not set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from piecework.errors import OptionError

TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"", "0", "false", "no", "off"})
# How often a thread of GNU's OpenMP looks before it sleeps, about 0.1 ms: longer than the gap between two operators of
# a step. Its own choice is some milliseconds, which a team that shares its cores with any other process, a compiler's
# say, spends whole at every barrier: a step then takes ten times as long as with one thread.
_SPINS = "2000"


@dataclass(frozen=True)
class Environment:
    """What the environment says, read once; the empty string means that a variable is not set."""

    home: str = ""  # HOME
    xdg_cache_home: str = ""  # XDG_CACHE_HOME
    xdg_config_home: str = ""  # XDG_CONFIG_HOME
    store: str = ""  # PIECEWORK_STORE: a folder, or the word `memory`
    store_read_only: bool = False  # PIECEWORK_STORE_READ_ONLY
    store_write_only: bool = False  # PIECEWORK_STORE_WRITE_ONLY
    strict: bool = False  # PIECEWORK_STRICT: a damaged entry is an error
    trust: str = ""  # PIECEWORK_TRUST: own, signed or any
    trusted_keys: str = ""  # PIECEWORK_TRUSTED_KEYS: a file with one public key a line
    debug: bool = False  # PIECEWORK_DEBUG: errors come with their traceback

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read the process's environment, or the variables given."""
        given = os.environ if variables is None else variables
        return cls(
            home=given.get("HOME", ""),
            xdg_cache_home=given.get("XDG_CACHE_HOME", ""),
            xdg_config_home=given.get("XDG_CONFIG_HOME", ""),
            store=given.get("PIECEWORK_STORE", ""),
            store_read_only=_is_true(given, "PIECEWORK_STORE_READ_ONLY"),
            store_write_only=_is_true(given, "PIECEWORK_STORE_WRITE_ONLY"),
            strict=_is_true(given, "PIECEWORK_STRICT"),
            trust=given.get("PIECEWORK_TRUST", ""),
            trusted_keys=given.get("PIECEWORK_TRUSTED_KEYS", ""),
            debug=_is_true(given, "PIECEWORK_DEBUG"),
        )


def read_variables(names: Iterable[str], variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of `names` that are set, for the allow-list of variables that change generated code."""
    given = os.environ if variables is None else variables
    return {name: given[name] for name in sorted(names) if given.get(name)}


def calm_openmp(variables: MutableMapping[str, str] | None = None) -> None:
    """Have the threads of torch's operators wait asleep rather than awake, before torch is imported.

    Who has said how they wait, by `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT`, is obeyed.
    """
    given = os.environ if variables is None else variables
    if not given.get("OMP_WAIT_POLICY") and not given.get("GOMP_SPINCOUNT"):
        given["GOMP_SPINCOUNT"] = _SPINS


def all_variables() -> dict[str, str]:
    """Return the process's environment, to give to a process of ours."""
    return dict(os.environ)


def _is_true(given: Mapping[str, str], name: str) -> bool:
    word = given.get(name, "").strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise OptionError(
            f"variable `{name}={given[name]}` is neither true nor false", hint=f"set `{name}=1` or `{name}=0`"
        )
    return word in TRUE_WORDS
