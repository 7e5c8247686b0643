"""Are a model's parallel linears faster as one product, and does it cost memory?

    .venv/bin/python benchmarks/merged_linears.py [MODEL]

A model folder (SmolLM2's shape with random weights where none is given) is built without and with
`merge_linears_everywhere`; then fresh processes start from the stores, one at a time and by turns, run steps of several
sizes, and tell their times and their peak memory. Where merged is not faster, `merge_linears` leaves a CPU alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import piecework as pw
from measure import write_result
from piecework.api.folder import open_model
from piecework.engine.generate import allocate_caches, run_step

HERE = pathlib.Path(__file__).resolve().parent
QUESTION = "Are a model's parallel linears faster as one product, and does it cost memory?"
SIZES = (1, 16, 128)
CAVEATS = (
    "Each figure is the median over processes of the least of a process's steps: noise only ever adds.",
    "The peak is the resident set's, with the pages of the mapped weight files that are still there.",
)


def options(is_merged: bool) -> pw.CompileOptions:
    """Return the options of one side; all else is equal."""
    passes = ("no_ops", "merge_linears_everywhere") if is_merged else ("no_ops",)
    return pw.CompileOptions(passes=passes, max_num_batched_tokens=256, ranges=((1, 256),), verify=False)


def make_folder(place: pathlib.Path, layers: int) -> pathlib.Path:
    """Write a random model of SmolLM2's shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=8192, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
    return place


def steps(model: str, store: str, is_merged: bool, repetitions: int) -> dict[str, float]:
    """Start from the store, run steps of each size, and return their times and the peak memory."""
    torch.set_num_threads(1)
    opened = open_model(model, options=options(is_merged), store=pw.DiskStore(store))
    found = {}
    for size in SIZES:
        ids = list(range(3, size + 3))
        taken = []
        for _ in range(repetitions):
            caches = allocate_caches(opened.sites, num_pages=1, page_size=256, dtype=opened.dtype)
            begin = time.perf_counter()
            run_step(opened.step, ids, 0, caches)
            taken.append(time.perf_counter() - begin)
        found[f"{size}"] = 1e3 * min(taken)
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def child(model: str, store: str, is_merged: bool, repetitions: int) -> dict[str, float]:
    """Run `steps` in a fresh process."""
    command = [sys.executable, __file__, model, "--store", store, "--repetitions", str(repetitions)]
    done = subprocess.run([*command, *(["--merged"] if is_merged else [])], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Build both, run both by turns, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--place", default="", help="where stores are kept, so that a second run builds nothing")
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    parser.add_argument("--merged", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "merged_linears.json")
    given = parser.parse_args()
    if given.store:
        print(json.dumps(steps(given.model, given.store, given.merged, given.repetitions)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = given.place or temporary
        model = given.model or str(make_folder(pathlib.Path(place, "model"), given.layers))
        store = f"{place}/store"
        sides = {"plain": False, "merged": True}
        for is_merged in sides.values():
            open_model(model, options=options(is_merged), store=pw.DiskStore(store))
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(given.rounds):
            for name, is_merged in sides.items():
                runs[name].append(child(model, store, is_merged, given.repetitions))
    if not given.rounds:
        return
    medians = {name: {key: statistics.median(r[key] for r in each) for key in each[0]} for name, each in runs.items()}
    ratios = {key: medians["merged"][key] / medians["plain"][key] for key in medians["plain"]}
    name = pathlib.Path(given.model).name if given.model else f"random, {given.layers} layers"
    body = {"model": name, "rounds": given.rounds, "figures": medians, "ratio": ratios}
    write_result(given.output, question=QUESTION, caveats=CAVEATS, body=body)
    print(json.dumps(body, indent=2))


if __name__ == "__main__":
    main()
