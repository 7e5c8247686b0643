"""The command `piecework`: what was typed becomes a call, and what fails a sentence, a hint and an exit code."""

from __future__ import annotations

import difflib
import gc
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from piecework.cli.arguments import regular
from piecework.cli.output import error_document, logging_as_it_was, print_error, print_json
from piecework.cli.watch import timed
from piecework.env import calm_openmp
from piecework.errors import OptionError, PieceworkError

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.exceptions import CycloptsError

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
_LIKENESS = 0.6  # of an option that is suggested
# Each command and its module.
_COMMANDS = {
    "generate": "commands",
    "build": "commands",
    "serve": "serve",
    "prewarm": "serve",
    "explain": "look",
    "dump": "look",
    "check": "look",
    "traffic": "traffic",
    "report": "report",
    "bisect": "bisect",
    "doctor": "doctor",
    "bench": "bench",
    "trace": "trace",
    "store": "store",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    # Imports make hundreds of thousands of objects that stay; to look among them for garbage costs a tenth of a start.
    gc.set_threshold(2_000_000, 20, 20)
    calm_openmp()
    # torch says so at its import, where numpy is not installed; nothing of ours wants it.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(given))


def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code. No failure leaves a traceback unless `--debug` is given."""
    return timed(arguments, _run)


def _run(arguments: Sequence[str]) -> int:
    from cyclopts.exceptions import CycloptsError

    try:
        with logging_as_it_was():
            result = make_app(arguments[0] if arguments else "")(
                regular(arguments), exit_on_error=False, print_error=False, result_action="return_value"
            )
        return result if isinstance(result, int) else 0
    except PieceworkError as error:
        return _fail(arguments, error, type(error).__name__, error.message, error.hint, error.facts, error.exit_code)
    except CycloptsError as error:
        message, hint = _explain_usage(error)
        return _fail(arguments, error, "OptionError", message, hint, {}, USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILURE
    except Exception as error:  # noqa: BLE001  the one place that stands between a bug and a user
        message = f"{type(error).__name__}: {error}"
        return _fail(arguments, error, type(error).__name__, message, "`--debug` shows where it happened", {}, FAILURE)


def make_app(typed: str = "") -> App:
    """Return the parser of all commands, of which only the typed one is imported where there is one.

    None of them loads torch or a model library.
    """
    from cyclopts import App

    import piecework

    app = App(
        name="piecework",
        help="Compile a model piece by piece, keep the pieces in a store, and start from it without a compiler.",
        version=piecework.__version__,
        version_flags=["--version"],
    )
    for name, module in _COMMANDS.items():
        place = f"piecework.cli.{module}"
        app.command(f"{place}:{name}" if typed in _COMMANDS else getattr(import_module(place), name), name=name)
    return app


def _fail(
    arguments: Sequence[str], error: Exception, kind: str, message: str, hint: str, facts: dict[str, Any], code: int
) -> int:
    if _is_debugged(arguments):
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    else:
        print_error(message, hint)
    if "--json" in arguments:
        print_json(error_document(kind, message, hint, facts, code))
    return code


def _is_debugged(arguments: Sequence[str]) -> bool:
    from piecework.env import Environment

    if "--debug" in arguments:
        return True
    try:
        return Environment.read().debug
    except OptionError:  # it is what failed, and is told anyway
        return False


def _explain_usage(error: CycloptsError) -> tuple[str, str]:
    """Say what was typed wrongly, and name the nearest thing that exists."""
    error.verbose = False
    text = " ".join(str(error).split())
    message, asked, rest = text.partition(" Did you mean ")
    if asked and _is_close(message, rest):
        return message, f"did you mean {rest}"
    return message, "`--help` after the command shows what it takes"


def _is_close(message: str, suggestion: str) -> bool:
    """Tell whether an option is like the one that was typed: two dashes that both begin with are no likeness."""
    typed, meant = (re.search(r"--([\w-]+)", text) for text in (message, suggestion))
    if typed is None or meant is None:
        return True
    return difflib.SequenceMatcher(None, typed[1], meant[1]).ratio() >= _LIKENESS


if __name__ == "__main__":
    main()
