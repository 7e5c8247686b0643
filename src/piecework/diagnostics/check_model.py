"""Whether a start from a model folder would work: each of its steps is taken, and its operators are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

from piecework.api.location import locate
from piecework.api.programs import read_weights
from piecework.diagnostics.check_operators import check_operators
from piecework.diagnostics.explain import find_or_plan
from piecework.diagnostics.findings import ABSENT, FAILS, WORKS, Finding
from piecework.errors import PieceworkError
from piecework.events import ignore
from piecework.models.folder import ModelFolder, open_folder
from piecework.ops import BODIES
from piecework.options import CompileOptions
from piecework.pipeline import bind_record
from piecework.seam.operators import resolve_bodies
from piecework.stages.find import require_artifacts, require_modules, with_siblings
from piecework.store.protocol import KernelStore
from piecework.values.record import Record


def check_model(
    model: str, *, dtype: str, device: str, options: CompileOptions, store: KernelStore, offline: bool
) -> Iterator[Finding]:
    """Yield a finding for each step of a start; a step that others need ends the list where it fails."""
    opened, finding = _try("configuration", lambda: open_folder(locate(model, offline=offline)))
    if opened is None:
        yield finding
        return
    yield Finding("configuration", WORKS, f"a `{opened.model_type}`")
    yield _tokenizer(opened)
    planned, finding = _try(
        "program",
        lambda: find_or_plan(
            model, dtype=dtype, device=device, options=options, store=store, observer=ignore, offline=offline
        ),
    )
    if planned is None:
        yield finding
        return
    key, record, where = planned
    if where is store:
        yield Finding("program", WORKS, f"stored under `{key[:16]}`")
        _, finding = _try("artifacts", lambda: require_artifacts(record, store))
        artifacts = {each for piece in record.pieces for each in piece.artifacts.values()}
        yield finding if finding.state == FAILS else Finding("artifacts", WORKS, f"{len(artifacts)}, all of them whole")
    else:
        yield Finding("program", ABSENT, "traces, and is not stored", "`piecework build MODEL` stores it")
    yield _operators(record)
    weights = _weights(key, record, opened, where, device)
    yield weights
    if weights.state == WORKS:
        yield from check_operators(model, dtype=dtype, device=device, offline=offline)


def _try(what: str, step: Callable[[], Any]) -> tuple[Any, Finding]:
    try:
        return step(), Finding(what, WORKS, "")
    except PieceworkError as error:
        return None, Finding(what, FAILS, error.message, error.hint)


def _tokenizer(folder: ModelFolder) -> Finding:
    file = folder.tokenizer_file
    if file is None:
        return Finding("tokenizer", ABSENT, "no `tokenizer.json`", "prompts have to be given as `--prompt-ids 1,2,3`")
    try:
        size = Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as error:  # noqa: BLE001  the library raises bare Exception for a file it cannot read
        return Finding("tokenizer", FAILS, f"`{file}` is not read", str(error))
    return Finding("tokenizer", WORKS, f"{size} words")


def _operators(record: Record) -> Finding:
    def resolve() -> None:
        require_modules(record)
        resolve_bodies(record, BODIES)

    _, finding = _try("operators", resolve)
    return finding if finding.state == FAILS else Finding("operators", WORKS, ", ".join(record.split_ops) or "none")


def _weights(key: str, record: Record, folder: ModelFolder, where: KernelStore, device: str) -> Finding:
    """Bind the program to the folder's weights: they are read, and held to the shapes it was made for."""

    def bind() -> int:
        weights = read_weights(record, folder.path, with_siblings(record, where))
        on_device = {name: tensor.to(device) for name, tensor in weights.items()}
        return len(bind_record(key, record, on_device, BODIES, where, ignore).weights)

    count, finding = _try("weights", bind)
    return finding if count is None else Finding("weights", WORKS, f"{count} tensors fit the program")
