"""How long does a start take, cold and warm, and what does a call cost the host: ours beside what users have today.

    PEERS=/some/temp/folder benchmarks/peers/make_environment.sh   # once; without it vLLM and SGLang are left out
    .venv/bin/python benchmarks/startup_and_dispatch.py --peers /some/temp/folder --repetitions 3

Every reading is a fresh process. A repetition goes through all stacks, each first with empty caches (cold) and then
thrice with the caches it left (warm; some build again on the first and second), so that a slow minute of the machine
falls on all of them; the order turns by one from repetition to repetition. Ratios are taken between least readings and
between medians of this one run.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from measure import REPOSITORY, fresh_process, write_result

HERE = pathlib.Path(__file__).resolve().parent
OURS = ("piecework", "piecework-default")
WITH_INDUCTOR = ("vllm", "sglang-inductor", "torch-marked", "torch-dynamic", "torch-layers")
PEERS = (*WITH_INDUCTOR, "sglang-eager", "eager")
FROM_WHEELS = {"vllm": ["vllm"], "sglang-inductor": ["sglang", "triton"], "sglang-eager": ["sglang", "triton"]}
CAVEATS = (
    "One thread, also for compiling: the systems' own compile pools are off, ours too.",
    "`first_result` runs from asking the stack to start to its first result; `bound`, ours alone, ends where the "
    "program is bound. Imports and the model's weights are in neither. `process_s` runs from the process's start to "
    "the first result, imports and weights included.",
    "vLLM and SGLang are their compile layers alone, without their servers, kernels and CUDA-only fusion passes; on a "
    "CPU vLLM by itself would trace once and not cut the graph.",
    "The toy is tiny on purpose: a call is nearly all host cost. It says nothing about kernels.",
    "Cold times hold the C++ compiler, which builds Inductor's CPU kernels and its precompiled header.",
)


def main() -> None:
    """Take the readings, print the table, and write the result."""
    arguments = _arguments()
    readings: list[dict[str, Any]] = []
    for repetition in range(arguments.repetitions):
        turn = repetition % len(arguments.stacks)
        for stack in [*arguments.stacks[turn:], *arguments.stacks[:turn]]:
            for reading in _start_cold_then_warm(stack, arguments):
                readings.append({"stack": stack, "repetition": repetition, **reading})
                print(_line(readings[-1]), file=sys.stderr, flush=True)
    table = {stack: _row([reading for reading in readings if reading["stack"] == stack]) for stack in arguments.stacks}
    ratios = _ratios(table)
    write_result(
        arguments.output,
        question="Cold start, warm start and host cost of a call, beside vLLM, SGLang and torch.compile",
        caveats=CAVEATS,
        body={
            "toy": {"layers": arguments.layers, "hidden": arguments.hidden, "num_tokens": arguments.num_tokens},
            "torch": sorted({reading["torch"] for reading in readings if "torch" in reading}),
            "yardstick_ms": _least_and_median([reading.get("yardstick_ms") for reading in readings]),
            "ratios": ratios,
            "table": table,
            "readings": readings,
        },
    )
    _print_table(table, ratios)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path, help="folder that make_environment.sh filled")
    parser.add_argument("--stacks", type=lambda text: text.split(","), default=[*OURS, *PEERS])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warm-starts", type=int, default=3)
    parser.add_argument("--compile-threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=2)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "startup_and_dispatch.json")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.stacks) - {*OURS, *PEERS})
    if unknown:
        parser.error(f"no stack is called {', '.join(unknown)}; there are {', '.join([*OURS, *PEERS])}")
    if arguments.peers is None:
        arguments.stacks = [stack for stack in arguments.stacks if stack not in FROM_WHEELS]
    return arguments


def _start_cold_then_warm(stack: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start `stack` with empty caches, then again with what it left there; the folder goes afterwards."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="startup-"))
    try:
        for start in range(1 if stack == "eager" else 1 + arguments.warm_starts):
            reading = fresh_process(
                _command(stack, folder, start > 0, arguments), environment=_environment(stack, folder, arguments)
            )
            yield {"phase": "warm" if start else "cold", "start": start, **reading}
            if "error" in reading:
                return
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(stack: str, folder: pathlib.Path, is_warm: bool, arguments: argparse.Namespace) -> list[str]:
    python = str(arguments.peers / "venv" / "bin" / "python") if stack in FROM_WHEELS else sys.executable
    command = [python, str(HERE / "peers" / "child.py"), "--stack", stack, "--folder", str(folder)]
    for name in ("layers", "hidden", "num_tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return [*command, *(["--warm"] if is_warm else [])]


def _environment(stack: str, folder: pathlib.Path, arguments: argparse.Namespace) -> dict[str, str]:
    """Put every cache that a stack may keep into the folder of this repetition.

    The temporary folder is one of them: Inductor keeps its precompiled headers there, whatever its own variable says.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    paths = [str(arguments.peers / wheel) for wheel in FROM_WHEELS.get(stack, ())]
    return {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "SGLANG_CACHE_DIR": str(folder / "sglang"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(arguments.compile_threads),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": ":".join(paths if stack in FROM_WHEELS else [str(REPOSITORY / "src")]),
    }


def _row(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Draw one stack's readings together: least and median of each quantity."""
    good = [reading for reading in readings if "error" not in reading]
    row: dict[str, Any] = {"readings": len(good), "errors": [r["error"] for r in readings if "error" in r]}
    for phase in ("cold", "warm"):
        chosen = [reading for reading in good if reading["phase"] == phase]
        row[f"{phase}_process_s"] = _least_and_median([reading["process_s"] for reading in chosen])
        for quantity in ("bound", "first_result"):
            known = [reading[quantity] for reading in chosen if reading[quantity]]
            row[f"{phase}_{quantity}_s"] = _least_and_median([elapsed["wall_s"] for elapsed in known])
            row[f"{phase}_{quantity}_processor_s"] = _least_and_median(
                [elapsed["own_s"] + elapsed["children_s"] for elapsed in known]
            )
    row["call_us"] = _least_and_median([r["call_us"] for r in good])
    row["call_yardsticks"] = _least_and_median([r["call_us"] / r["yardstick_ms"] for r in good])
    return row


def _least_and_median(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"least": round(min(known), 4), "median": round(statistics.median(known), 4)} if known else None


def _ratios(table: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide ours by the fastest peer's, for each quantity that has a bar or stands beside one."""
    asked = [
        ("warm start to a bound program, against first result", "warm_bound_s", "warm_first_result_s", PEERS[:-1]),
        ("warm start to the first result", "warm_first_result_s", "warm_first_result_s", PEERS[:-1]),
        ("cold start to the first result", "cold_first_result_s", "cold_first_result_s", WITH_INDUCTOR),
        (
            "cold start to the first result, processor seconds",
            "cold_first_result_processor_s",
            "cold_first_result_processor_s",
            WITH_INDUCTOR,
        ),
        ("cold process, imports included", "cold_process_s", "cold_process_s", WITH_INDUCTOR),
        ("warm process, imports included", "warm_process_s", "warm_process_s", PEERS[:-1]),
        ("host cost of a call", "call_us", "call_us", PEERS),
        ("host cost of a call, in yardsticks", "call_yardsticks", "call_yardsticks", PEERS),
    ]
    ratios = []
    for ours in OURS:
        for name, our_quantity, peer_quantity, peers in asked:
            rivals = {peer: table[peer][peer_quantity] for peer in peers if table.get(peer, {}).get(peer_quantity)}
            mine = table.get(ours, {}).get(our_quantity)
            if not mine or not rivals:
                continue
            ratio: dict[str, Any] = {"stack": ours, "quantity": name}
            for kind in ("least", "median"):
                fastest = min(rivals, key=lambda peer, kind=kind: rivals[peer][kind])
                ratio |= {kind: round(mine[kind] / rivals[fastest][kind], 4), f"{kind}_against": fastest}
            ratios.append(ratio)
    return ratios


def _line(reading: dict[str, Any]) -> str:
    head = f"{reading['repetition']} {reading['stack']:18} {reading['phase']:5}"
    if "error" in reading:
        return f"{head} error: {reading['error'].splitlines()[-1][:150]}"
    return (
        f"{head} first result {reading['first_result']['wall_s']:7.2f} s  process {reading['process_s']:7.2f} s  "
        f"call {reading['call_us']:8.1f} us  yardstick {reading['yardstick_ms']:.2f} ms"
    )


def _print_table(table: dict[str, dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> None:
    columns = {
        "cold s": "cold_first_result_s",
        "cold processor s": "cold_first_result_processor_s",
        "warm s": "warm_first_result_s",
        "warm bound s": "warm_bound_s",
        "cold process s": "cold_process_s",
        "warm process s": "warm_process_s",
        "call us": "call_us",
        "yardsticks": "call_yardsticks",
    }
    print("| stack (least / median) | " + " | ".join(columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for stack, row in table.items():
        cells = [
            "–" if row[quantity] is None else f"{row[quantity]['least']:.4g} / {row[quantity]['median']:.4g}"
            for quantity in columns.values()
        ]
        print(f"| {stack} | " + " | ".join(cells) + " |")
    for ratio in ratios:
        print(
            f"{ratio['stack']}: {ratio['quantity']}: least {ratio['least']:.3f} of {ratio['least_against']}'s, "
            f"median {ratio['median']:.3f} of {ratio['median_against']}'s"
        )


if __name__ == "__main__":
    main()
