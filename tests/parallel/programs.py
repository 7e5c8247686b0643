"""What ranks do in tests: open a folder, continue prompts, tell what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import piecework as pw
from piecework.events import ArtifactCompiled, Phase, Recorder, RecordHit
from piecework.parallel.events import RanksAgreed

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 3, 4, 20, 21], [3]]


def options(ranks: int, compiler: str, **more: Any) -> pw.CompileOptions:
    """Return options of one small range."""
    return pw.CompileOptions(
        tensor_parallel_size=ranks, compiler=compiler, max_num_batched_tokens=64, ranges=((1, 64),), **more
    )


def tell(folder: Path, store: Path | None, ranks: int, compiler: str, more: dict[str, Any]) -> dict[str, Any]:
    """Open a folder, continue the prompts, and return the tokens with what the start did."""
    seen = Recorder()
    kept = pw.DiskStore(store) if store is not None else pw.MemoryStore()
    llm = pw.LLM(folder, options=options(ranks, compiler, **more), store=kept, observer=seen)
    answers = llm.generate(PROMPTS, max_tokens=12, ignore_eos=True)
    agreed = seen.of(RanksAgreed)
    return {
        "tokens": [each.token_ids for each in answers],
        "margins": [min(each.generation.margins) for each in answers],
        "compiled": len(seen.of(ArtifactCompiled)),
        "traced": sum(each.name == "trace" for each in seen.of(Phase)),
        "hits": len(seen.of(RecordHit)),
        "key": agreed[0].key if agreed else "",
        "owner": agreed[0].owner if agreed else 0,
        "had": agreed[0].had if agreed else (),
        "notes": dict(llm.model.record.notes) if llm.model.record else {},
    }


def tell_each(folders: list[Path], stores: list[Path], ranks: int, compiler: str, more: dict[str, Any]) -> Any:
    """Do so for several folders, one after another; each rank has a store of its own where there are as many."""
    import torch.distributed as dist

    found = {}
    for folder in folders:
        rank = dist.get_rank() if dist.is_initialized() else int(__import__("os").environ.get("RANK", "0"))
        found[folder.name] = tell(folder, stores[rank % len(stores)], ranks, compiler, more)
    return found


def alternate(folder: Path, store: Path, settings: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Open several engines in this process, then ask each in turn, twice."""
    kept = pw.DiskStore(store)
    engines = [
        pw.LLM(folder, options=options(one["ranks"], "eager", passes=one["passes"]), store=kept) for one in settings
    ]
    answers = [engine.generate(PROMPTS, max_tokens=6, ignore_eos=True) for _ in range(2) for engine in engines]
    return [[each.token_ids for each in one] for one in answers]
