"""What `explain` found, for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

_MOST_REASONS = 3  # for which a pass left most alone; `--json` has each place


def explain_lines(found: Mapping[str, Any]) -> list[str]:
    """Lay out what `explain_record` returned."""
    state = "stored" if found["is_stored"] else "not stored"
    lines = [
        f"program     {found['key']} ({state})",
        f"regions     {found['regions']}: {found['opaque']} opaque, {found['sites']} sites of "
        f"{found['distinct']} distinct pieces" + (f", {found['inline']} inline" if found["inline"] else ""),
        *(f"ranges      {name}: {', '.join(cuts)}" for name, cuts in found["sizes"].items()),
        f"artifacts   {found['artifacts']}, of which {len(found['missing_artifacts'])} are not stored",
        _cut_line(found),
        *_differing_cuts(found["cuts_by_range"]),
        f"operators   {_operators(found['operators'])}",
        *_rank_lines(found.get("ranks")),
        *(line for report in found["passes"] for line in _pass_lines(report)),
        *(f"capture     {line}" for line in found.get("capture", [])),
        "",
        *(line for piece in found["pieces"] for line in _piece_lines(piece)),
        "",
        "in order:",
        *_order(found["cuts"]),
    ]
    for miss in found.get("misses", []):
        lines += ["", f"not started from the store: {miss['reason']}"]
        lines += [f"  differs: {each}" for each in miss["factors"]]
    return lines


def _rank_lines(ranks: Mapping[str, Any] | None) -> list[str]:
    """Say how many ranks share the model, and what a step sends between them."""
    if ranks is None:
        return []
    counts = ", ".join(f"{count} {name}" for name, count in ranks["collectives"].items())
    return [
        f"ranks       {ranks['count']}, each with {ranks['kv_heads']} heads of keys a layer; a step has {counts}",
        f"wire        a rank sends {ranks['sent_bytes_of_64_tokens']} bytes in a step of 64 tokens",
    ]


def _cut_line(found: Mapping[str, Any]) -> str:
    """Say at which operators the graph is cut, and when; or that it is whole, and what is called inside."""
    names = ", ".join(_declared(name, found) for name in found["split_ops"])
    if found["partition"] == "none":
        return f"cut at      nothing: one piece{f', with {names} inside' if names else ''}"
    when = ", in what was compiled of the whole graph" if names and found["partition"] == "inductor" else ""
    return f"cut at      {names or 'nothing: one piece'}{when}"


def _differing_cuts(by_range: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Say of each range how it is cut, where ranges differ."""
    if len({tuple(counts.items()) for counts in by_range.values()}) < 2:
        return []
    return [f"            {box}: {c['opaque']} opaque, {c['sites']} sites" for box, c in by_range.items()]


def _declared(name: str, found: Mapping[str, Any]) -> str:
    module = next((m for op, m in found["declared_by"].items() if op.partition(".")[0] == name.partition(".")[0]), "")
    return f"{name} (declared in {module})" if module else name


def _operators(states: Mapping[str, str]) -> str:
    """Say which operators are on, and by which implementation each is preferred."""
    on = [f"{name} ({state[4:].split()[0]})" for name, state in states.items() if state.startswith("on: ")]
    return f"on: {', '.join(on)}" if on else "off, but for what no compiler can write"


def _pass_lines(report: Mapping[str, Any]) -> list[str]:
    """Say how often a pass matched, why an operator that is off stays on, and what most was left alone for."""
    kept = dict.fromkeys(place.partition(": ")[2] for place in report["places"] if "it stays on: " in place)
    reasons = Counter(miss.partition(": ")[2] or miss for miss in report["misses"])
    left = (f"{count} left alone: {reason}" for reason, count in reasons.most_common(_MOST_REASONS))
    return [f"pass        {_pass_line(report)}", *(f"            {line}" for line in (*kept, *left))]


def _pass_line(report: Mapping[str, Any]) -> str:
    many = "es" if report["matches"] != 1 else ""
    note = f"; {report['note']}" if report["note"] else ""
    left = f"; {len(report['misses'])} left alone" if report["misses"] else ""
    return f"{report['name']} (version {report['version']}): {report['matches']} match{many}{left}{note}"


def _piece_lines(piece: Mapping[str, Any]) -> list[str]:
    many = "s" if piece["sites"] != 1 else ""
    lines = [f"piece {piece['number']}     {piece['digest'][:16]}: {piece['sites']} site{many}, {piece['calls']} calls"]
    for box, artifact in piece["artifacts"].items():
        if artifact["is_stored"]:
            note = f"; fell back: {artifact['fall_back']}" if artifact["fall_back"] else ""
            note += f"; assumes {' and '.join(artifact['guards'])}" if artifact["guards"] else ""
            note += f"; verified: {artifact['verified']}" if artifact["verified"] else ""
            note += "".join(f"; pass {one['name']}: {one['matches']}" for one in artifact["passes"])
            what = f"{artifact['compiler']}, {artifact['size_bytes']} bytes{note}"
        else:
            what = "not stored"
        lines.append(f"            {box}: {artifact['key'][:16]} {what}")
    return lines


def _order(cuts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the regions one a line, a run that repeats itself once."""
    names = [f"piece {cut['piece']}" if cut["kind"] == "piece" else " + ".join(cut["calls"]) for cut in cuts]
    pairs = [tuple(names[index : index + 2]) for index in range(0, len(names), 2)]
    lines = []
    for pair, run in groupby(pairs):
        count = len(list(run))
        lines.append(f"  {', '.join(pair)}" + (f"   x {count}" if count > 1 else ""))
    return lines


def option_lines(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lay out every option's value and where it came from."""
    rows = [(name, _shown(each["value"]), each["origin"]) for name, each in options.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{name.ljust(widths[0])}  {value.ljust(widths[1])}  {origin}" for name, value, origin in rows]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join("-".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value) or "-"
    return "-" if value is None or value == "" else str(value).lower() if isinstance(value, bool) else str(value)


def guard_lines(found: Mapping[str, Any]) -> list[str]:
    """Lay out what `explain_guards` returned: each condition with its line and proof, each value with its line."""
    shapes = [
        (guard["expression"], f"holds: {proof_text(guard)}", guard["line"] or "taken for granted by the tracer")
        for guard in found["shape_guards"]
    ]
    own = [fact for fact in found["facts"] if not _INNER.search(fact["what"])]
    facts = [(fact["what"], fact["value"], _OURS.sub("", fact["line"])) for fact in _alike(own)]
    inner = len(found["facts"]) - len(own)
    return [
        "conditions on sizes:", *(_columns(shapes) or ["  none"]),
        "Python values that the trace took for constant:", *(_columns(facts) or ["  none"]),
        *([f"  and {inner} of torch's own: the tables and hooks of each module"] if inner else []),
        f"functions traced: {len(found['functions'])}",
    ]  # fmt: skip


_INNER = re.compile(r"(?:^|\.)_\w+$")
_OURS = re.compile(r"^dynamo\.py:\d+$")  # where the tracer was started: no line of the model's
_PROOFS = {"every size": "tried at every size", "every pair": "tried at every pair", "intervals": "by its bounds"}


def proof_text(guard: Mapping[str, Any]) -> str:
    """Say how a condition on sizes was shown to hold."""
    if guard["method"] == "sample":
        return f"on a sample of {guard['checked']} alone"
    count = f", {guard['checked']} of them" if guard["checked"] > 1 else ""
    return f"{_PROOFS.get(guard['method'], guard['method'])}{count}"


def _alike(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write what is the same in many layers once, by the first of them."""
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for fact in facts:
        name = re.sub(r"\.\d+(?=\.|$)|\[\d+\]", ".*", fact["what"])
        groups.setdefault((name, fact["kind"], fact["value"], fact["line"]), []).append(fact)
    return [
        {**group[0], "what": group[0]["what"] + (f" (and {len(group) - 1} alike)" if len(group) > 1 else "")}
        for group in groups.values()
    ]


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    widths = [min(60, max((len(row[column]) for row in rows), default=0)) for column in range(2)]
    return [f"  {row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}  {row[2]}".rstrip() for row in rows]
