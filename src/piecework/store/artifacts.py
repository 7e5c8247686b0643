"""Artifacts as the store keeps them: a small record, and their text and kernels as blobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.store.protocol import ARTIFACT, Store
from piecework.values.artifact import Artifact


def write_artifact(store: Store, key: str, artifact: Artifact, factors: Mapping[str, Any]) -> None:
    """Write an artifact's blobs, then its record."""
    kernels = {name: store.write_blob(data) for name, data in artifact.kernels.items()}
    record = {
        "kind": artifact.kind,
        "text": store.write_blob(artifact.text.encode()),
        "kernels": kernels,
        "guards": list(artifact.guards),
        "facts": dict(artifact.facts),
        "factors": dict(factors),
        "size_bytes": artifact.size_bytes,
    }
    store.write_record(ARTIFACT, key, record)


def read_artifact(store: Store, key: str) -> Artifact:
    """Read an artifact back as a value."""
    record = store.read_record(ARTIFACT, key)
    kernels = {name: store.read_blob(digest) for name, digest in record["kernels"].items()}
    text = store.read_blob(record["text"]).decode()
    return Artifact(record["kind"], text, kernels, tuple(record["guards"]), dict(record["facts"]))
