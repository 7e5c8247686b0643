"""The command line as typed, made regular before it is parsed: `-O2`, `-tp 2`, `-cc.mode=0` and `-cc '{…}'`.

These spellings are those of vLLM, whose users know them; no parser of ours has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

LEVEL_FLAG = "--optimization-level"
CONFIG_FLAG = "--compilation-config"
RANKS_FLAG = "--tensor-parallel-size"
PAIR_FLAG = "--compilation-pair"

_LEVEL = re.compile(r"-O=?(\d+)")
_PAIR = re.compile(r"(?:-cc|--compilation-config)\.([\w.]+)(?:=(.*))?", re.DOTALL)


def regular(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with those spellings written as flags of the parser; what follows `--` stays as it is."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*_rewrite(iter(arguments[:end])), *arguments[end:]]


def _rewrite(arguments: Iterator[str]) -> Iterator[str]:
    for argument in arguments:
        level, pair = _LEVEL.fullmatch(argument), _PAIR.fullmatch(argument)
        if level is not None:
            yield f"{LEVEL_FLAG}={level[1]}"
        elif pair is not None:
            value = pair[2] if pair[2] is not None else next(arguments, "")
            yield f"{PAIR_FLAG}={pair[1]}={value}"
        elif argument in ("-O", "-cc"):
            yield f"{LEVEL_FLAG if argument == '-O' else CONFIG_FLAG}={next(arguments, '')}"
        elif argument == "-tp":
            yield f"{RANKS_FLAG}={next(arguments, '')}"
        elif argument.startswith("-tp="):
            yield f"{RANKS_FLAG}={argument.removeprefix('-tp=')}"
        elif argument.startswith("-cc="):
            yield f"{CONFIG_FLAG}={argument.removeprefix('-cc=')}"
        else:
            yield argument
