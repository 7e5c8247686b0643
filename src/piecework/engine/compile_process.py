"""Compile a model folder into a store, and say under which key: `python -m piecework.engine.compile_process`.

A server runs this beside itself. It reads one line of JSON (folder, dtype, device, options, store, trust, variables)
and writes lines of JSON: how far it is, then `key` or `error`. Weights never travel: the trace needs their shapes
alone. When what started it goes away, its standard input ends, and so does it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from piecework.engine.requests import folder_request
from piecework.errors import PieceworkError, StoreUnwritable
from piecework.events import ArtifactCompiled, ArtifactReused, Event, FallBack, SplitDone, StoreWarning
from piecework.models.folder import open_folder
from piecework.models.hugging_face import load_model
from piecework.options import from_mapping
from piecework.pipeline import start_from
from piecework.seam.groups import standing_in
from piecework.stages.find import require_artifacts
from piecework.store.disk import DiskStore
from piecework.store.trust import AnyFiles, OwnFiles
from piecework.values.placement import group_name
from piecework.values.record import Record

Tell = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """Compile what standard input asks for; return 0 where there is a key, else 1."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no line of ours

    def tell(line: Mapping[str, Any]) -> None:
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    try:
        job = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_parent, daemon=True).start()
        tell({"key": compile_folder(job, tell)})
    except PieceworkError as error:
        tell({"error": error.message, "hint": error.hint})
        return 1
    except Exception as error:  # noqa: BLE001  whatever it is, the server has to be told
        tell({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
        return 1
    return 0


def compile_folder(job: Mapping[str, Any], tell: Tell) -> str:
    """Compile the folder of a job into its store; return the record's key."""
    total = done = 0

    def observe(event: Event) -> None:
        nonlocal total, done
        match event:
            case SplitDone():
                total += event.artifacts
            case ArtifactCompiled() | ArtifactReused():
                done += 1
            case FallBack():
                tell({"note": f"{event.what}: {event.reason}"})
                return
            case StoreWarning():
                tell({"note": f"store: {event.reason}"})
                return
            case _:
                return
        tell({"done": done, "total": max(total, done)})

    folder = open_folder(job["folder"])
    store = DiskStore(job["store"], trust=AnyFiles() if job["trust"] == "any" else OwnFiles(), observer=observe)
    settings = from_mapping(job["options"]).resolve()

    def finish(key: str, record: Record) -> str:
        require_artifacts(record, store)
        return key

    # Kernels are built for the server's threads; this process's own runs take one, since the server needs the rest.
    torch.set_num_threads(job.get("threads") or torch.get_num_threads())
    request = folder_request(folder, job["dtype"], job["device"], settings, load_model, job.get("variables", {}))
    torch.set_num_threads(1)
    ranks = settings.tensor_parallel_size
    with standing_in(group_name(ranks), ranks) if ranks > 1 else nullcontext():
        key = start_from(request, finish, store, observe)
    if store.kept_in_memory:
        raise StoreUnwritable(
            f"the store at `{store.path}` took not all of what was compiled", hint="is the disk full, or read-only?"
        )
    return key


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
