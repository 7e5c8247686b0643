"""How long from the start of a process to the first token, on the real model: ours warm, beside Transformers' own?

    .venv/bin/python benchmarks/first_token.py --repetitions 5

The bar: `piecework generate` with a warm store takes at most a third of the time of a script that calls Transformers'
own `generate`, for the same prompt, in one run.

Both are processes that load the float32 weights of the model that `make demo` uses, read the prompt as text, make one
token and print it; the time is from the start of the process to there. That of the whole process, which takes down what
it set up, stands beside it. The store is filled before. Both have run once before they are timed, so that all files lie
in the page cache; the readings take turns. Every reading checks that both give the same token.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from measure import REPOSITORY, versions, write_result

sys.path.insert(0, str(REPOSITORY / "scripts"))

from real_model import real_model

HERE = pathlib.Path(__file__).resolve().parent
BAR = 1 / 3
PROMPT = "The history of bread begins with wild grain, a flat stone and"
CAVEATS = (
    "In it: the interpreter's start, imports, the weights, the prompt, one token. `process_…` holds the end too.",
    "Wall seconds are what a user waits for, on a shared machine they swing; processor seconds stand beside them.",
    "Files lie in the page cache. From a cold disk both would wait for the same weights.",
)
SPENT = """
import os, time
print("SPENT", time.monotonic() - float(os.environ["SPAWNED_AT"]), time.process_time(), flush=True)
"""
OURS = """
import sys
from piecework.cli.main import main
try:
    main()
except SystemExit as end:
    if end.code:
        raise
"""
THEIRS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
inputs = tokenizer(sys.argv[2], return_tensors="pt")
with torch.no_grad():
    out = model.generate(**inputs, max_new_tokens=1, do_sample=False)
print("TOKEN", out[0, inputs["input_ids"].shape[1]:].tolist())
"""


def main() -> None:
    """Fill the store, take the readings in turn, print the ratio and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--store", default="", help="folder of the store; a fresh one without it")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "first_token.json")
    arguments = parser.parse_args()
    folder = str(real_model())
    with tempfile.TemporaryDirectory(prefix="first-token-") as fresh:
        store = arguments.store or fresh
        run(ours(folder, store))  # builds where the store is empty
        theirs = [sys.executable, "-c", THEIRS + SPENT, folder, PROMPT]
        commands = {"piecework": ours(folder, store), "transformers": theirs}
        readings: list[dict[str, Any]] = []
        for repetition in range(-1, arguments.repetitions):
            for name in list(commands) if repetition % 2 else list(reversed(commands)):
                reading = {"system": name, "repetition": repetition, **run(commands[name])}
                if repetition >= 0:
                    readings.append(reading)
                print(json.dumps(reading), file=sys.stderr, flush=True)
    findings = compare(readings)
    write_result(
        arguments.output, question="From process start to the first token, warm, beside Transformers' own generate",
        caveats=CAVEATS,
        body={
            "bar": round(BAR, 3), "prompt": PROMPT, "versions": versions("torch", "transformers"),
            "findings": findings, "readings": readings,
        },
    )  # fmt: skip
    print(json.dumps(findings, indent=1))


def ours(folder: str, store: str) -> list[str]:
    """Return what runs the command that a user gives; its JSON holds the token."""
    return [
        sys.executable, "-c", OURS + SPENT, "generate", folder, "--prompt", PROMPT, "--max-tokens", "1",
        "--dtype", "float32", "--store", store, "--json",
    ]  # fmt: skip


def run(command: list[str]) -> dict[str, Any]:
    """Run a process to its end; return its wall and processor seconds and the token that it gave."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIECEWORK_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode, on both sides
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPOSITORY / "src")}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        environment["SPAWNED_AT"] = repr(time.monotonic())
        began = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=error)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
        if process.returncode:
            error.seek(0)
            raise SystemExit(f"{command[1:4]} ended with {process.returncode}: {error.read()[-2000:]}")
    text, _, spent = text.rpartition("SPENT ")
    first_wall_s, first_processor_s = map(float, spent.split())
    found: dict[str, Any] = {
        "wall_s": round(first_wall_s, 3),
        "processor_s": round(first_processor_s, 3),
        "process_wall_s": round(wall_s, 3),
        "process_processor_s": round(usage.ru_utime + usage.ru_stime, 3),
    }
    if text.lstrip().startswith("{"):
        document = json.loads(text)
        return {**found, "token": document["token_ids"][0], "compiled": document["compiled"]}
    return {**found, "token": json.loads(text.partition("TOKEN ")[2].splitlines()[0])[0]}


def compare(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare least and median of both, and hold both to one token."""
    tokens = {reading["token"] for reading in readings}
    assert len(tokens) == 1, f"the two give different tokens: {tokens}"
    assert not any(reading.get("compiled") for reading in readings), "a start that was to be warm compiled"
    found: dict[str, Any] = {}
    for quantity in ("wall_s", "processor_s", "process_wall_s", "process_processor_s"):
        for name, draw in (("least", min), ("median", statistics.median)):
            mine, theirs = (
                draw([reading[quantity] for reading in readings if reading["system"] == system])
                for system in ("piecework", "transformers")
            )
            found[f"{quantity}_{name}"] = {
                "piecework": round(mine, 3), "transformers": round(theirs, 3), "ratio": round(mine / theirs, 3),
            }  # fmt: skip
    return found


if __name__ == "__main__":
    main()
