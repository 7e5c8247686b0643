"""What torch's import leaves out is there for whoever asks, and before anybody traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from piecework.seam import deferred

ALL = ["torch._meta_registrations", "torch.distributions", "torch.optim", "torch.quantization"]
BEGIN = """
import importlib.util, json, sys
from piecework.seam.deferred import defer_torch, deferred, run_deferred
was_begun = defer_torch()
import torch
found = [was_begun, list(deferred())]
"""


def fresh(code: str) -> Any:
    """Run code in a process that has not imported torch; return what it leaves in `found`."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code + "\nprint(json.dumps(found))"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_step_runs_and_each_name_runs_its_module() -> None:
    code = """
torch.nn.functional.scaled_dot_product_attention(*[torch.randn(1, 2, 4, 8)] * 3)
importlib.util.find_spec("transformers")
found.append(list(deferred()))
from torch.optim.lr_scheduler import StepLR
found.append(list(deferred()))
found.append([torch.optim.SGD.__name__, torch.optim.__loader__.__class__.__name__, list(deferred())])
from torch.distributions import Normal
found.append([Normal.__module__, list(deferred())])
run_deferred()
found.append(list(deferred()))
"""
    without_optim = [name for name in ALL if name != "torch.optim"]
    assert fresh(code) == [
        True,
        ALL,
        ALL,
        ALL,  # a module inside one that waits runs by itself
        ["SGD", "SourceFileLoader", without_optim],
        ["torch.distributions.normal", ["torch._meta_registrations", "torch.quantization"]],
        [],
    ]


@pytest.mark.parametrize(
    "code",
    [
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode():\n    shape = torch.linalg.cholesky(torch.randn(4, 4)).shape",
        "shape = torch.compile(lambda x: torch.linalg.cholesky(x), backend='aot_eager', fullgraph=True)"
        "(torch.eye(4)).shape",
        "import transformers\nshape = torch.linalg.cholesky(torch.randn(4, 4, device='meta')).shape",
    ],
    ids=["fake tensors", "torch.compile", "transformers"],
)
def test_whoever_traces_finds_all_of_torch(code: str) -> None:
    assert fresh(code + "\nfound += [list(shape), list(deferred())]") == [True, ALL, [4, 4], []]


def test_torch_that_is_imported_stays_as_it_is() -> None:
    import torch

    assert not deferred.defer_torch()
    assert deferred.deferred() == ()
    assert torch.optim.SGD is not None
