"""The commands that say whom a store believes: keygen, sign and trust."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from piecework.cli.flags import (
    OUTPUT_DEFAULTS,
    STORE_DEFAULTS,
    CompileFlags,
    OutputFlags,
    StoreFlags,
)
from piecework.cli.output import print_json, start_logging

if TYPE_CHECKING:
    from piecework.store.disk import DiskStore


def open_folder(flags: StoreFlags) -> DiskStore:
    """Open the folder that flags or environment name; what lies there is told of on standard error."""
    from piecework.cli.settings import gather, open_store
    from piecework.diagnostics.report_lines import ReportLines
    from piecework.env import Environment
    from piecework.errors import OptionError
    from piecework.store.disk import DiskStore
    from piecework.store.layout import is_remote

    start_logging()
    settings = gather(CompileFlags(), flags, Environment.read())
    store = open_store(settings, ReportLines(str(settings.store.store)))
    if is_remote(str(settings.store.store)):
        raise OptionError(
            f"`{settings.store.store}` is a remote store, and this command looks at a folder",
            hint="`piecework store pull URL --store DIR` brings what is there into a folder",
        )
    if not isinstance(store, DiskStore):
        raise OptionError("the store `memory` ends with its process", hint="name a folder: `--store DIR`")
    return store


def keygen(
    file: Annotated[Path, Parameter(name="FILE", help="The file of the secret key; the public one goes to FILE.pub.")],
    *,
    name: Annotated[str, Parameter(help="Whose key it is; the file's name if not given.")] = "",
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Make a pair of keys to sign records with."""
    from piecework.store.keys import make_key

    public = make_key(file, name)
    if output.json:
        print_json({"secret": str(file), "public": str(file.with_suffix(".pub")), "id": public.id})
    else:
        print(f"secret key in {file}: keep it; public key in {file.with_suffix('.pub')}:\n{public}")


def sign(
    *,
    key: Annotated[Path, Parameter(help="The file of the secret key.", metavar="FILE")],
    policy: Annotated[str, Parameter(help="What the records are signed for.")] = "default",
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Sign every record of the store."""
    from piecework.store.keys import read_secret
    from piecework.store.signing import sign_records

    signed = sign_records(open_folder(store_flags), read_secret(key), policy)
    if output.json:
        print_json({"signed": [list(name) for name in signed]})
    else:
        print(f"signed {len(signed)} records")


def trust(
    file: Annotated[Path, Parameter(name="FILE", help="A file of public keys, as `keygen` writes them.")],
    *,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Add public keys to those that `--trust signed` believes."""
    from piecework.cli.settings import keys_file
    from piecework.env import Environment
    from piecework.store.keys import add_trusted, read_trusted

    target = keys_file(store_flags, Environment.read())
    added = [str(key) for key in read_trusted(file) if add_trusted(target, key)]
    if output.json:
        print_json({"trusted_keys": str(target), "added": added})
    else:
        print(f"{len(added)} keys added to {target}")
