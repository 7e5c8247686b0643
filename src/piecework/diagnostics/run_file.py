"""A run as a file: what happened, where and when, as a trace that Perfetto opens and that reads back to the event.

The file is one JSON object. `traceEvents` are in the format of Chrome's tracing; `args` of each hold the event's own
fields, so that nothing stands in the file twice. What is known of the run as a whole stands under `piecework`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piecework.diagnostics.run_check import check_entry, check_facts
from piecework.errors import OptionError

FORMAT = "piecework run 1"
_PLACE = ("start_ns", "end_ns", "process", "thread")


@dataclass(frozen=True)
class Run:
    """One run. `events` are plain data, as `Event.as_dict` gives, times in nanoseconds from the process's start.

    `facts` are of the run: `command`, `started_at`, `versions`, `model`, `keys`, `counters`. `wall_ns` is where it
    ends, `ready_ns` where its last program could be called (0: never). `threads` are names by process and thread.
    """

    events: Sequence[Mapping[str, Any]]
    wall_ns: int
    ready_ns: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    threads: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Return the events of some types, by name, oldest first."""
        return [event for event in self.events if event["event"] in kinds]


def title(event: Mapping[str, Any]) -> str:
    """Name an event for people, as it stands in a waterfall."""
    kind = event["event"]
    match kind:
        case "Phase" | "SubPhase":
            text = str(event["name"])
        case "Imported":
            text = f"import {event['package']}"
        case "ArtifactCompiled":
            text = f"compile {event['piece']} for {event['range']}"
        case "ArtifactLoaded":
            text = f"load {event['piece']} for {event['range']}"
        case "Verified":
            text = f"verify {event['piece']} for {event['range']}"
        case "StoreRead" | "StoreWrite":
            text = f"{'read' if kind == 'StoreRead' else 'write'} {event['kind']}"
        case "Captured":
            text = f"capture {event['phase']} {event['size']}"
        case _:
            text = kind
    return f"{event['part']}: {text}" if event.get("part") else text


def write_run(run: Run, path: str | Path) -> None:
    """Write a run to a file. Raises OptionError where it cannot be written."""
    processes = sorted({process for process, _ in run.threads})
    names = [_name("process_name", process, 0, f"piecework {process}") for process in processes]
    names += [_name("thread_name", process, thread, name) for (process, thread), name in sorted(run.threads.items())]
    document = {
        "traceEvents": [*names, *map(_trace_event, run.events)],
        "displayTimeUnit": "ms",
        # Perfetto stops at a name that it does not know: it stands last.
        "piecework": {"format": FORMAT, "wall_ns": run.wall_ns, "ready_ns": run.ready_ns, **run.facts},
    }
    try:
        Path(path).write_text(json.dumps(document, ensure_ascii=False, default=str), encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"the timeline cannot be written to `{path}`: {error.strerror}", hint="give a file in a folder that exists"
        ) from error


def read_run(path: str | Path) -> Run:
    """Read a run from its file. Raises OptionError where it is none."""
    file = Path(path)
    try:
        document = json.loads(file.read_bytes())
        about = dict(document["piecework"])
        if about.pop("format") != FORMAT:
            raise OptionError(f"`{file}` holds a run in a format that this release does not read", hint="upgrade")
        check_facts(about)
        events, threads = [], {}
        for entry in document["traceEvents"]:
            if entry["ph"] != "M":
                check_entry(entry)
                events.append(_event(entry))
            elif entry["name"] == "thread_name":
                threads[entry["pid"], entry["tid"]] = str(entry["args"]["name"])
        return Run(events, about.pop("wall_ns"), about.pop("ready_ns"), about, threads)
    except OSError as error:
        raise OptionError(
            f"there is no run to read at `{file}`: {error.strerror}", hint="give a file that `--timeline FILE` wrote"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"`{file}` is no run: {type(error).__name__}: {error}", hint="give a file that `--timeline FILE` wrote"
        ) from error


def _trace_event(event: Mapping[str, Any]) -> dict[str, Any]:
    duration_ns = event["end_ns"] - event["start_ns"]
    shape = {"ph": "X"} if duration_ns > 0 else {"ph": "i", "s": "t"}
    place = {"ts": _micro(event["start_ns"]), "pid": event["process"], "tid": event["thread"]}
    length = {"dur": _micro(duration_ns)} if duration_ns > 0 else {}
    own = {name: value for name, value in event.items() if name not in _PLACE}
    # Numbers first: a reader that looks for them alone stumbles over no character of a name.
    return {**shape, **place, **length, "name": title(event), "cat": event["event"], "args": own}


def _micro(time_ns: int) -> float:
    """Return microseconds from which a reader has the very nanosecond, also one that cuts off what lies behind it.

    Perfetto does, and leaves out a span that seems to end after the one round it.
    """
    exact = time_ns / 1000
    return exact if int(exact * 1000.0) == time_ns else (time_ns + 0.25) / 1000


def _event(entry: Mapping[str, Any]) -> dict[str, Any]:
    start_ns = round(entry["ts"] * 1000)
    times = {"start_ns": start_ns, "end_ns": start_ns + round(entry.get("dur", 0) * 1000)}
    return {**entry["args"], **times, "process": entry["pid"], "thread": entry["tid"]}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
