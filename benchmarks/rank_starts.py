"""Do two ranks ever hang where one of their stores was damaged? Fifty starts, each after a deletion at random.

    .venv/bin/python -m benchmarks.rank_starts [--starts 50] [--inductor 8] [--output FILE]

Each rank has a store of its own. Before each start all of one store, its records, or one of its blobs is deleted; then
both ranks start in fresh processes and continue two prompts greedily. A start that takes longer than its patience is a
hang. The tokens of every start are held to those of the first. The last starts compile by Inductor.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from benchmarks.measure import write_result

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from parallel.programs import tell_each  # noqa: E402
from parallel.several_ranks import on_ranks  # noqa: E402
from parallel.test_agreement import SEED, spoil  # noqa: E402
from tiny_models import tiny_folder  # noqa: E402

CAVEATS = (
    "Seeded: the same deletions each time. A tiny random Llama of three layers, gloo, one machine.",
    "Seconds are of a shared machine: they show that nothing waited for long, and nothing else.",
)


def starts(count: int, compiler: str, folder: pathlib.Path, place: pathlib.Path) -> list[dict[str, Any]]:
    """Start once on empty stores, then `count` times after a deletion; return what each start did."""
    stores = [place / compiler / "first", place / compiler / "second"]
    chance, found = random.Random(SEED), []
    for number in range(count + 1):
        deleted = spoil(stores, chance) if number else "nothing, both are empty"
        began = time.perf_counter()
        ranks: list[Any] = []
        try:
            ranks = on_ranks(2, tell_each, [folder], stores, 2, compiler, {})
        except TimeoutError as error:
            print(error, flush=True)
        each = [rank[folder.name] if isinstance(rank, dict) and folder.name in rank else {} for rank in ranks]
        found.append(
            {
                "compiler": compiler,
                "deleted": deleted,
                "hung": not ranks,
                "seconds": round(time.perf_counter() - began, 1),
                "traced": [one.get("traced") for one in each],
                "compiled": [one.get("compiled") for one in each],
                "keys": len({one.get("key") for one in each}),
                "tokens": [one.get("tokens") for one in each],
            }
        )
        print(compiler, number, deleted, found[-1]["seconds"], found[-1]["compiled"], flush=True)
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Count what the starts did."""
    first = {one["compiler"]: one["tokens"][0] for one in reversed(found)}
    after = [one for one in found if not one["deleted"].startswith("nothing")]
    return {
        "starts_after_a_deletion": len(after),
        "hangs": sum(one["hung"] for one in found),
        "starts_with_other_tokens": sum(any(t != first[one["compiler"]] for t in one["tokens"]) for one in found),
        "starts_with_two_programs": sum(one["keys"] != 1 for one in found),
        "starts_in_which_both_compiled": sum(all(one["compiled"]) for one in found),
        "starts_that_compiled_nothing": sum(not any(one["compiled"]) for one in after),
        "longest_s": max(one["seconds"] for one in found),
        "deleted": dict(sorted(Counter(f"{one['compiler']}: {one['deleted']}" for one in after).items())),
    }


def main() -> None:
    """Start as often as was asked for, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--inductor", type=int, default=8, help="how many of them compile by Inductor")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "rank_starts.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        folder = tiny_folder("llama", place / "llama")
        found = starts(given.starts - given.inductor, "eager", folder, place)
        found += starts(given.inductor, "inductor", folder, place) if given.inductor else []
    body = summary(found)
    write_result(given.output, question=(__doc__ or "").splitlines()[0], caveats=CAVEATS, body=body)
    print(body)


if __name__ == "__main__":
    main()
