"""Load: artifacts from the store become code, by one loader on cold and warm starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from piecework.errors import ArtifactMissing, CorruptEntry, PieceworkError
from piecework.events import ArtifactLoaded, Observer
from piecework.seam.loader import load
from piecework.spans import spanning
from piecework.store.protocol import ARTIFACT, KernelStore
from piecework.values.artifact import Artifact, LoadedPiece
from piecework.values.faults import artifact_fault


def load_artifacts(
    wanted: Mapping[tuple[int, str], str], texts: Sequence[str], store: KernelStore, observer: Observer
) -> dict[tuple[int, str], LoadedPiece]:
    """Load the artifact of every (piece, box); one that stands for several is loaded once.

    `texts` are the digests of the pieces' texts. A key is not believed: an artifact says which piece it was made of.
    """
    by_key: dict[str, LoadedPiece] = {}
    loaded: dict[tuple[int, str], LoadedPiece] = {}
    for (number, box), key in wanted.items():
        if key not in by_key:
            by_key[key] = _load(key, texts[number], number, box, store, observer)
        loaded[number, box] = by_key[key]
    return loaded


def _load(key: str, piece: str, number: int, box: str, store: KernelStore, observer: Observer) -> LoadedPiece:
    start_ns = time.perf_counter_ns()
    with spanning(observer) as span:
        loaded, size_bytes = _read(key, piece, number, store)
    observer(
        ArtifactLoaded(
            piece=f"piece {number}", range=box, key=key, size_bytes=size_bytes,
            layer=store.layer_of(ARTIFACT, key), start_ns=start_ns, span=span,
        )  # fmt: skip
    )
    return loaded


def _read(key: str, piece: str, number: int, store: KernelStore) -> tuple[LoadedPiece, int]:
    """Read an artifact and make it runnable; return it and its size."""
    record = store.read_record(ARTIFACT, key)
    if fault := artifact_fault(key, record):
        store.set_aside(ARTIFACT, key, fault)
        raise ArtifactMissing(f"artifact `{key[:12]}`: {fault}", facts={"key": key, "reason": fault})
    if record["factors"].get("piece") != piece:
        raise ArtifactMissing(
            f"the artifact under key `{key[:12]}` was made of another piece than piece {number}",
            hint="`piecework store verify` shows what else is not what it says; the next start compiles it anew",
            facts={"key": key, "piece": piece},
        )
    kernels = {name: store.read_blob(digest) for name, digest in record["kernels"].items()}
    text = store.read_blob(record["text"]).decode("utf-8", "replace")
    artifact = Artifact(record["kind"], text, kernels, tuple(record["guards"]), record["facts"])
    try:
        return load(artifact, kernel_path=store.kernel_path), record["size_bytes"]
    except PieceworkError:
        raise
    except Exception as error:
        # Its bytes are those that were written: what wrote them, this release or this machine is at fault. To take it
        # for a miss would hide that behind a compile at each start.
        raise CorruptEntry(
            f"artifact `{key[:12]}` cannot be loaded: {type(error).__name__}: {str(error)[:300]}",
            hint="`--store-write-only` makes everything anew; if it comes back, it is a bug here: please report it",
            facts={"key": key},
        ) from error
