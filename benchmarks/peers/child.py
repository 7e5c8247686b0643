"""Take one reading of one stack in this fresh process, and print it as one line.

    python child.py --stack vllm --folder CACHES [--warm] [--layers 32] [--hidden 16] [--num-tokens 2]

Cache folders come with the environment; `startup_and_dispatch.py` sets them. Imports and the model's weights are not
in the times, except in `process_s`, from the start of the process to the first result.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch

from measure import Elapsed, print_reading, since_spawned_s, time_calls, versions, yardstick_ms
from peers.work import Call, Work
from toy_llama import ToyShape

# stack -> module and function; a module is imported in its own child alone, since each prepares the process its way.
STACKS = {
    "piecework": ("peers.piecework_layer", "one_range"),
    "piecework-default": ("peers.piecework_layer", "default_options"),
    "vllm": ("peers.vllm_layer", "piecewise"),
    "sglang-inductor": ("peers.sglang_layer", "inductor"),
    "sglang-eager": ("peers.sglang_layer", "eager"),
    "torch-marked": ("peers.torch_compile", "marked"),
    "torch-dynamic": ("peers.torch_compile", "dynamic"),
    "torch-layers": ("peers.torch_compile", "layers"),
    "eager": ("peers.torch_compile", "eager"),
}
# Relative L2 error against the eager model, float32: room for another order of additions, none for a wrong result.
TOLERANCE = 1e-5
OTHER_SIZE = 5


def main() -> None:
    """Start the stack, time its calls, then check what it computes, at the example's size and at another."""
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    shape = ToyShape(layers=arguments.layers, hidden=arguments.hidden, intermediate=2 * arguments.hidden)
    work = Work(shape, arguments.num_tokens, arguments.folder, arguments.warm)
    module, name = STACKS[arguments.stack]
    start_stack = getattr(importlib.import_module(module), name)
    with start_stack(work) as started:
        reading = {
            "process_s": round(since_spawned_s(), 4),
            "first_result": _rounded(started.first_result),
            "bound": _rounded(started.bound),
            "compiler_imported": sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)),
        }
        inputs = work.inputs()
        yardstick_before = yardstick_ms()
        calls = time_calls(lambda: started.call(*inputs), blocks=arguments.blocks)
        reading |= {"call_us": calls.least_us, "call_median_us": calls.median_us, "calls": calls.calls}
        reading["yardstick_ms"] = min(yardstick_before, yardstick_ms())
        reading["relative_error"] = _check(started.call, work)
    print_reading(reading | started.facts | versions("torch"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", required=True, choices=sorted(STACKS))
    parser.add_argument("--folder", required=True, type=pathlib.Path)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=1000)
    return parser.parse_args()


def _rounded(elapsed: Elapsed | None) -> dict[str, float] | None:
    return elapsed and {name: round(seconds, 4) for name, seconds in vars(elapsed).items()}


def _check(call: Call, work: Work) -> float:
    """Compare with the eager model, and return the larger relative error; a wrong result is no reading."""
    worst = 0.0
    for num_tokens in (work.num_tokens, OTHER_SIZE):
        inputs = work.inputs(num_tokens)
        expected = work.model()(*inputs)
        worst = max(worst, ((call(*inputs) - expected).norm() / expected.norm()).item())
    if not worst <= TOLERANCE:
        sys.exit(f"the result differs from eager's by {worst:.2e} in relative L2 norm; allowed is {TOLERANCE:.0e}")
    return worst


if __name__ == "__main__":
    main()
