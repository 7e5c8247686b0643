"""The commands that carry a store to a remote and from there."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from piecework.cli.flags import OUTPUT_DEFAULTS, STORE_DEFAULTS, OutputFlags, StoreFlags
from piecework.cli.output import print_json
from piecework.cli.store_keys import open_folder

Url = Annotated[str, Parameter(name="URL", help="s3://BUCKET/PREFIX, gs://, az://, file:// or, to pull, https://.")]
Keys = Annotated[list[str] | None, Parameter(help="Only this record and what it refers to.", negative="")]


def push(
    url: Url, *, key: Keys = None, store_flags: StoreFlags = STORE_DEFAULTS, output: OutputFlags = OUTPUT_DEFAULTS
) -> None:
    """Write the store, or some records with all they refer to, to a remote."""
    from piecework.store.carry import PATIENCE_S
    from piecework.store.carry import push as push_store
    from piecework.store.inventory import find_record
    from piecework.store.link import Link

    store = open_folder(store_flags)
    keep = [find_record(store, each) for each in key] if key else None
    link = Link(url, observer=store.observer, patience_s=PATIENCE_S)
    _tell("pushed", push_store(store, link, keep), output)


def pull(
    url: Url, *, key: Keys = None, store_flags: StoreFlags = STORE_DEFAULTS, output: OutputFlags = OUTPUT_DEFAULTS
) -> None:
    """Bring records from a remote into the store, verified; takes `--trust signed` or `--trust any`."""
    from piecework.store.carry import PATIENCE_S
    from piecework.store.carry import pull as pull_store
    from piecework.store.link import Link
    from piecework.store.remote import RemoteStore

    store = open_folder(store_flags)
    link = Link(url, observer=store.observer, patience_s=PATIENCE_S)
    remote = RemoteStore(store, link, observer=store.observer, write_back=False)
    store.check_writable()
    _tell("pulled", pull_store(remote, key), output)


def _tell(verb: str, names: list[tuple[str, str]], output: OutputFlags) -> None:
    if output.json:
        print_json({"records": [list(name) for name in names]})
    else:
        kinds: dict[str, int] = {}
        for kind, _ in names:
            kinds[kind] = kinds.get(kind, 0) + 1
        print(f"{verb} {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")


def finish_writing(store: Any) -> None:
    """Wait until what a build made is on the remote, where there is one; raise where it does not get there."""
    from piecework.errors import StoreUnwritable
    from piecework.store.link import UPLOAD_S

    left = store.flush(UPLOAD_S)
    if left:
        raise StoreUnwritable(
            f"{left} objects were not written to `{store.link.url}`",
            hint="the warning above says why; what was made is in the folder, and `piecework store push` tries again",
        )
