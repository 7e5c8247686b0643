"""The commands about a store: what it holds, keeping it within bounds, carrying it, and whom to believe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from piecework.cli.flags import (
    OUTPUT_DEFAULTS,
    STORE_DEFAULTS,
    OutputFlags,
    StoreFlags,
)
from piecework.cli.output import date_text, print_json, size_text, table
from piecework.cli.store_keys import keygen, open_folder, sign, trust
from piecework.cli.store_remote import pull, push

if TYPE_CHECKING:
    from piecework.store.disk import DiskStore

Key = Annotated[str, Parameter(name="KEY", help="A record's key, or as much of its beginning as names one.")]


def list_records(
    *,
    kind: Annotated[str, Parameter(help="Records of one kind: program, artifact or probe.", metavar="KIND")] = "",
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """List what is stored, with sizes and last uses."""
    from piecework.store.inventory import list_stored

    found = list_stored(open_folder(store_flags), kind)
    if output.json:
        print_json(
            [
                {
                    "kind": each.kind,
                    "key": each.key,
                    "bytes": each.total_bytes,
                    "written": date_text(each.written_s),
                    "last_use": date_text(each.last_use_s),
                    "is_signed": each.is_signed,
                }
                for each in found
            ]
        )
        return
    rows = [
        [each.kind, each.key, size_text(each.total_bytes), date_text(each.last_use_s), "signed" * each.is_signed]
        for each in found
    ]
    if rows:
        print(table(rows, ["kind", "key", "size", "last use", ""]))


def show(key: Key, *, store_flags: StoreFlags = STORE_DEFAULTS, output: OutputFlags = OUTPUT_DEFAULTS) -> None:
    """Show one record: what it was made with, what it refers to, and its bytes."""
    from piecework.store.inventory import find_record
    from piecework.store.inventory import show as show_record

    store = open_folder(store_flags)
    found = show_record(store, *find_record(store, key))
    if output.json:
        print_json(found)
        return
    for name, value in _flat(found):
        print(f"{name}: {value}")


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Write nested plain data as dotted names; long lists by their length."""
    if isinstance(value, dict) and value:
        return [row for name, each in value.items() for row in _flat(each, f"{path}.{name}" if path else str(name))]
    if isinstance(value, list | tuple) and len(value) > 8:
        return [(path, f"{len(value)} items")]
    return [(path, value)]


def stat(*, store_flags: StoreFlags = STORE_DEFAULTS, output: OutputFlags = OUTPUT_DEFAULTS) -> None:
    """Count records, blobs and bytes."""
    from piecework.store.inventory import measure

    found = measure(open_folder(store_flags))
    if output.json:
        print_json({**asdict(found), "total_bytes": found.total_bytes})
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.records.items()) or "none"
    print(f"store       {found.path} (format {found.format})")
    print(f"records     {kinds}; {size_text(found.record_bytes)}")
    lone = f"{found.unreferenced_blobs} that no record refers to"
    print(f"blobs       {found.blobs}; {size_text(found.blob_bytes)}; {lone}")
    print(f"quarantine  {found.quarantined} damaged entries")


def gc(
    *,
    max_bytes: Annotated[
        str | None, Parameter(help="Evict the least recently used beyond this, as 500M or 2G.", metavar="SIZE")
    ] = None,
    unused_days: Annotated[
        float | None, Parameter(help="Evict what was not used for so many days.", metavar="DAYS")
    ] = None,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Remove what nothing refers to, and the least recently used beyond the bounds given."""
    from piecework.store.collect import DAY_S, collect

    bound = parse_size(max_bytes) if max_bytes is not None else None
    unused_s = unused_days * DAY_S if unused_days is not None else None
    found = collect(open_folder(store_flags), max_bytes=bound, unused_s=unused_s)
    if output.json:
        print_json(asdict(found))
        return
    removed = f"{found.blobs_removed} blobs and {found.rubbish_removed} leftovers"
    print(f"evicted {len(found.evicted)} records, removed {removed}")
    print(f"{size_text(found.freed_bytes)} freed, {size_text(found.left_bytes)} left")
    if bound is not None and found.left_bytes > bound:
        print(f"{len(found.held)} records are in use, or young: the bound of {size_text(bound)} is not met yet")


def parse_size(text: str) -> int:
    """Read a number of bytes, with K, M or G for powers of 1024."""
    from piecework.errors import OptionError

    number = text.strip().upper().removesuffix("B").removesuffix("I")
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(number[-1:], 1)
    try:
        size = float(number[:-1] if factor > 1 else number) * factor
        if not 0 <= size < float("inf"):
            raise ValueError
    except ValueError as error:
        raise OptionError(f"`{text}` is no size", hint="write it as 500M or 2G") from error
    return int(size)


def verify(
    *,
    repair: Annotated[bool, Parameter(help="Move what is damaged to quarantine.", negative="")] = False,
    recompile: Annotated[
        bool, Parameter(help="Also compile each artifact of this toolchain again, and compare.", negative="")
    ] = False,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> int:
    """Read every entry as a start would, and list what would not be loaded; exit code 1 if anything is."""
    from piecework.store.inventory import verify as verify_store

    store = open_folder(store_flags)
    faults = verify_store(store, repair=repair)
    audit = _recompile(store) if recompile else {}
    if output.json:
        print_json({"faults": [asdict(fault) for fault in faults], "repaired": repair, **audit})
    else:
        for fault in faults:
            print(f"{fault.path}: {fault.reason}")
        print(f"{len(faults)} damaged entries" if faults else "every entry is whole")
        _tell_audit(audit)
    return 1 if (faults and not repair) or audit.get("differences") else 0


def _recompile(store: DiskStore) -> dict[str, Any]:
    from piecework.api.recompile import recompile

    found = recompile(store)
    return {
        "compared": found.compared,
        "differences": [asdict(each) for each in found.differences],
        "skipped": found.skipped,
    }


def _tell_audit(audit: dict[str, Any]) -> None:
    for each in audit.get("differences", ()):
        print(f"{each['kind']} {each['key']}: {'; '.join(each['what'])}")
    for key, reason in audit.get("skipped", {}).items():
        print(f"not compared: {key[:20]}: {reason}")
    if audit:
        differ, skipped = len(audit["differences"]), len(audit["skipped"])
        print(f"{audit['compared']} artifacts were compiled again, {differ} differ, {skipped} not compared")


def why(
    first: Annotated[str, Parameter(name="A", help="The key of one record.")],
    second: Annotated[str, Parameter(name="B", help="The key of another.")],
    *,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Say in which factors two records differ, so that one is not found where the other is wanted."""
    from piecework.store.inventory import find_differences, find_record, identity_of

    store = open_folder(store_flags)
    one, other = (identity_of(store, *find_record(store, key)) for key in (first, second))
    found = find_differences(one, other)
    if output.json:
        print_json([{"factor": path, "first": left, "second": right} for path, left, right in found])
        return
    for path, left, right in found:
        print(f"{path}: `{left}` / `{right}`")
    if not found:
        print("nothing that a lookup compares differs")


def export_file(
    file: Annotated[Path, Parameter(name="FILE", help="The archive to write.")],
    *,
    key: Annotated[list[str] | None, Parameter(help="Only this record and what it refers to.", negative="")] = None,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Write the store, or some records with all they refer to, into one file."""
    from piecework.store.archive import export_archive
    from piecework.store.inventory import find_record

    store = open_folder(store_flags)
    keep = [find_record(store, each) for each in key] if key else None
    _tell_archived("wrote", asdict(export_archive(store, file, keep)), output)


def import_file(
    file: Annotated[Path, Parameter(name="FILE", help="An archive that `export` wrote.")],
    *,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Add what an archive holds, once all of it is verified."""
    from piecework.store.archive import import_archive

    _tell_archived("added", asdict(import_archive(open_folder(store_flags), file)), output)


def _tell_archived(verb: str, found: dict[str, Any], output: OutputFlags) -> None:
    if output.json:
        print_json(found)
    else:
        print(f"{verb} {len(found['records'])} records and {found['blobs']} blobs, {size_text(found['size_bytes'])}")


store = App(name="store", help="Look at a store, keep it within bounds, carry it, and say whom to believe.")
store.command(list_records, name="ls")
for _command in (show, stat, gc, verify, why, keygen, sign, trust, push, pull):
    store.command(_command)
store.command(export_file, name="export")
store.command(import_file, name="import")
