"""Load: artifacts from the store become code, by one loader on cold and warm starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from piecework.errors import ArtifactMissing, CorruptEntry
from piecework.events import ArtifactLoaded, Observer
from piecework.seam.loader import load
from piecework.spans import spanning
from piecework.store.protocol import ARTIFACT, KernelStore
from piecework.values.artifact import Artifact, LoadedPiece


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
    if record.get("factors", {}).get("piece") != piece:
        raise ArtifactMissing(
            f"the artifact under key `{key[:12]}` was made of another piece than piece {number}",
            hint="`piecework store verify` shows what else is not what it says; the next start compiles it anew",
            facts={"key": key, "piece": piece},
        )
    try:
        kind, text, kernels = record["kind"], store.read_blob(record["text"]).decode(), dict(record["kernels"])
        guards, facts, size_bytes = tuple(record["guards"]), dict(record["facts"]), int(record["size_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptEntry(f"artifact `{key[:12]}` does not hold what its format says: {error}") from error
    artifact = Artifact(kind, text, {name: store.read_blob(digest) for name, digest in kernels.items()}, guards, facts)
    return load(artifact, kernel_path=store.kernel_path), size_bytes


def is_loadable(record: Any) -> bool:
    """Tell whether an artifact record names everything that loading needs."""
    return isinstance(record, Mapping) and {"kind", "text", "kernels", "guards", "facts", "size_bytes"} <= set(record)
