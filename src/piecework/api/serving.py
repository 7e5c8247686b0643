"""An engine for a model folder: eager as soon as its weights are in."""

from __future__ import annotations

from pathlib import Path

from piecework.api.location import locate
from piecework.api.stores import report_to_log
from piecework.engine.loop import Engine, parameter_bytes
from piecework.engine.options import EngineOptions, Progress
from piecework.engine.served import Served
from piecework.engine.service import Report
from piecework.engine.text import read_tokenizer
from piecework.errors import ModelError
from piecework.events import Observer, phase
from piecework.models.folder import KvSite, ModelFolder, StateSite, open_folder


def unheard(progress: Progress) -> None:
    """Report nothing."""


def open_engine(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    engine: EngineOptions | None = None,
    observer: Observer | None = None,
    offline: bool = False,
    report: Report = unheard,
) -> Engine:
    """Open a model folder for serving; `report` hears how far loading is."""
    watch = observer or report_to_log
    folder = open_folder(locate(model, offline=offline))
    report(Progress("loading", 0, 1, str(folder.path)))
    served = _open_eager(folder, dtype, device, watch)
    report(Progress("loading", 1, 1, str(folder.path)))
    return Engine(served, engine)


def _open_eager(folder: ModelFolder, dtype: str, device: str, observer: Observer) -> Served:
    from piecework.models.hugging_face import load_model

    with phase(observer, "weights"):
        loaded = load_model(folder.path, dtype=dtype, device=device)
    states = [site.name for site in loaded.sites if isinstance(site, StateSite)]
    if states:
        raise ModelError(
            f"`{folder.path}` keeps a recurrent state at `{states[0]}`, which the engine does not batch",
            hint="`piecework generate` and `pw.LLM` serve it, one sequence at a time",
            facts={"sites": states},
        )
    return Served(
        step=loaded.model if loaded.keeps_rows else lambda ids, positions, rows: loaded.model(ids, positions),
        sites=tuple(site for site in loaded.sites if isinstance(site, KvSite)),
        dtype=loaded.dtype,
        device=device,
        end_of_sequence=folder.end_of_sequence,
        max_positions=folder.max_positions,
        vocabulary_size=int(folder.config.get("vocab_size") or 0),
        tokenizer=read_tokenizer(folder) if folder.tokenizer_file is not None else None,
        config=folder.config,
        weights_bytes=parameter_bytes(loaded.model),
    )
