"""What do more layers cost: as many artifacts, as long a compilation, and a trace that grows with them alone?

    .venv/bin/python benchmarks/layers.py --layers 8,32,128

The bars: 128 layers need as many artifacts as 8, and at most 1.1 times the compile time; the trace is linear.

Each reading is a cold start of the toy (hidden 16, the attention operator opaque) in a fresh process with empty caches:
traced, cut, compiled by Inductor for size 1 and for 2 to 8,192, bound, and compared with the model at one size. Seconds
are processor seconds of the process and its compilers, which hardly notice a shared machine's neighbours. Where the
wall's are fewer those are given: importing the stages lies between two phases.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from measure import REPOSITORY, Elapsed, fresh_process, print_reading, write_result

HERE = pathlib.Path(__file__).resolve().parent
COMPILE_BAR = 1.1
CAVEATS = (
    "One thread, compiler included. Least of the repetitions for each number of layers.",
    "Compiling is the same work for any number of layers: what differs is noise, and how warm the machine's caches "
    "are. The order of the readings turns from repetition to repetition.",
    "The toy decides something by whether a step has one token, so that it is traced twice: once for size 1 alone.",
)


def main() -> None:
    """Take the readings, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")], default=[8, 32, 128])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "layers.json")
    arguments = parser.parse_args()
    if arguments.child:
        print_reading(read(arguments.child, arguments.compiler))
        return
    readings = []
    for repetition in range(arguments.repetitions):
        turn = repetition % len(arguments.layers)
        for layers in [*arguments.layers[turn:], *arguments.layers[:turn]]:
            readings.append({"layers": layers, "repetition": repetition, **start(layers, arguments.compiler)})
            print(json.dumps(readings[-1]), file=sys.stderr, flush=True)
    table = [row(layers, readings) for layers in arguments.layers]
    findings = compare(table)
    write_result(
        arguments.output, question="What more layers cost at a cold start", caveats=CAVEATS,
        body={"compiler": arguments.compiler, "findings": findings, "table": table, "readings": readings},
    )  # fmt: skip
    for one in table:
        print(json.dumps(one))
    print(json.dumps(findings, indent=1))


def start(layers: int, compiler: str) -> dict[str, Any]:
    """Start the toy with empty caches in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="layers-") as folder:
        environment = {
            "HOME": folder, "TMPDIR": folder, "XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY / "src"),
        }  # fmt: skip
        command = [sys.executable, __file__, "--child", str(layers), "--compiler", compiler]
        return fresh_process(command, environment=environment, timeout_s=1800.0)


def read(layers: int, compiler: str) -> dict[str, Any]:
    """Start the toy here; return what each phase cost and what was made."""
    import torch

    import piecework as pw
    from piecework.events import ArtifactCompiled, Phase, SplitDone
    from toy_llama import OPERATOR, ToyLlama, ToyShape, fill_weights

    torch.set_num_threads(1)
    model = ToyLlama(ToyShape(layers=layers))
    fill_weights(model)
    seconds: dict[str, float] = {}
    found: dict[str, Any] = {"artifacts": 0}
    last = Elapsed.now()

    def observe(event: Any) -> None:
        nonlocal last
        if isinstance(event, Phase):
            spent = last.until_now()
            last = Elapsed.now()
            processor_s = min(spent.own_s + spent.children_s, event.elapsed_s)
            seconds[event.name] = seconds.get(event.name, 0.0) + processor_s
        elif isinstance(event, ArtifactCompiled):
            found["artifacts"] += 1
        elif isinstance(event, SplitDone):
            found.update(regions=event.regions, distinct=event.distinct)

    ids = torch.arange(7)
    options = pw.CompileOptions(compiler=compiler, ranges=((1, 8192),), split_ops=(OPERATOR,))
    tokens = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}
    with torch.no_grad():
        program = pw.compile(
            model, (ids, ids), dynamic=tokens, options=options, store=pw.MemoryStore(), observer=observe
        )
        error = float((program(ids, ids) - model(ids, ids)).norm() / model(ids, ids).norm())
    assert error < 1e-5, error
    return {**found, "error": error, **{f"{name}_s": round(spent, 4) for name, spent in seconds.items()}}


def row(layers: int, readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw the readings of one number of layers together."""
    good = [
        reading for reading in readings if reading["layers"] == layers and "error" in reading and "artifacts" in reading
    ]
    if not good:
        return {"layers": layers, "errors": [reading.get("error") for reading in readings]}
    drawn: dict[str, Any] = {"layers": layers, "artifacts": sorted({reading["artifacts"] for reading in good})}
    for name in ("trace_s", "split_s", "unique_s", "compile_s", "load_s", "bind_s"):
        values = [reading[name] for reading in good if name in reading]
        drawn[name] = {"least": min(values), "median": round(statistics.median(values), 4)} if values else None
    return drawn


def compare(table: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the most layers with the fewest, and the trace's slope between neighbours."""
    few, many = table[0], table[-1]
    slopes = [
        round((b["trace_s"]["least"] - a["trace_s"]["least"]) / (b["layers"] - a["layers"]) * 1e3, 2)
        for a, b in zip(table, table[1:], strict=False)
    ]
    ratio = many["compile_s"]["least"] / few["compile_s"]["least"]
    return {
        "artifacts_equal": few["artifacts"] == many["artifacts"],
        "compile_ratio": round(ratio, 3),
        "compile_bar": COMPILE_BAR,
        "trace_ms_per_layer_between_neighbours": slopes,
    }


if __name__ == "__main__":
    main()
