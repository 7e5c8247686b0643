"""What the sample store of each format holds. `python tests/compat/sample.py FOLDER` writes it as this release would.

A released sample is never written again: a change of what comes out here is a new format, with a folder of its own.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from piecework.store.archive import export_archive
from piecework.store.disk import DiskStore
from piecework.store.keys import SecretKey
from piecework.store.signing import sign_records

KERNEL = b"\x7fELF stands for the bytes of a kernel\x00\x01\xff"
TEXT = b"def call(x0, w0):\n    return (kernel(x0, w0),)\n"
EMPTY = b""
SECRET = SecretKey(bytes(range(32)), "sample")  # of no worth: it is printed here
ARTIFACT_KEY = "5eed" * 16
PROGRAM_KEY = "a1b2c3d4.0123456789abcdef"


def fill(store: DiskStore) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the sample; return its artifact record and its program record."""
    text, kernel, empty = (store.write_blob(data) for data in (TEXT, KERNEL, EMPTY))
    artifact = {
        "kind": "inductor",
        "text": text,
        "kernels": {"cpp_fused_0": kernel, "nothing": empty},
        "guards": ["s0 <= 4096"],
        "facts": {"device": "cpu", "isa": None, "ratio": 0.5, "é": [True, -1, {}]},
    }
    program = {"artifacts": {"piece0:2-64": ARTIFACT_KEY}, "toolchain": {"torch": "2.13.0", "python": "3.11"}}
    store.write_record("artifact", ARTIFACT_KEY, artifact)
    store.write_record("program", PROGRAM_KEY, program)
    store.write_record("probe", "machine", {"isa": "avx2"})
    sign_records(store, SECRET, "sample")
    return artifact, program


def write_sample(folder: Path) -> None:
    """Write the store and its archive, without the folders that hold nothing for a reader."""
    store = DiskStore(folder / "store")
    fill(store)
    export_archive(store, folder / "store.tar")
    for name in ("staging", "flights", "quarantine"):
        shutil.rmtree(folder / "store" / name, ignore_errors=True)


if __name__ == "__main__":
    write_sample(Path(sys.argv[1]))
