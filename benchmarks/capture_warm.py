"""The warm start that `capture.py` times: a fresh process, told by its environment what to load and where to write."""

from __future__ import annotations

import json
import os
import sys
import time

START = time.perf_counter()
sys.path[:0] = json.loads(os.environ["WARM_PATH"])

import torch  # noqa: E402
from benchmarks.llama_shape import LLAMA_8B, TINY, Metadata, inputs, llama, metadata  # noqa: E402

from piecework.api.programs import load  # noqa: E402
from piecework.events import Phase, Recorder  # noqa: E402
from piecework.store.disk import DiskStore  # noqa: E402

COMPILER = ("triton", "sympy", "torch._inductor", "torch._dynamo")


def main() -> None:
    """Load, run once, write the result."""
    shape = TINY if os.environ["WARM_TINY"] else LLAMA_8B
    model = llama(shape)
    step = Metadata.allocate(shape, 4, 1024, torch.bfloat16, is_masked=False)
    torch.cuda.synchronize()
    names = dict(model.named_parameters()) | dict(model.named_buffers())
    watch = Recorder()
    opened = time.perf_counter()
    program = load(DiskStore(os.environ["WARM_STORE"]), key=os.environ["WARM_KEY"], weights=names, observer=watch)
    bound_s = time.perf_counter() - opened
    with metadata(step), torch.no_grad():
        first = time.perf_counter()
        result = program(*inputs(shape, 4, 1023))
        torch.cuda.synchronize()
        first_s = time.perf_counter() - first
    torch.save(result.cpu(), os.environ["WARM_RESULT"])
    reading = {
        "bound_s": round(bound_s, 4),
        "first_run_s": round(first_s, 4),
        "process_s": round(time.perf_counter() - START, 2),
        "phases": {event.name: round(event.elapsed_s, 4) for event in watch.of(Phase)},
        "imported": [name for name in COMPILER if name in sys.modules],
    }
    print("WARM " + json.dumps(reading))


if __name__ == "__main__":
    main()
