"""What a profiler sees of an operator on a GPU, beside the traffic model."""

from __future__ import annotations

import pytest
import torch

from piecework.diagnostics.traffic.bandwidth import measure_bandwidth
from piecework.diagnostics.traffic.measured import measure_calls, measure_operator
from piecework.diagnostics.traffic.operators import OperatorCall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_one_elementwise_call_is_one_launch() -> None:
    x = torch.ones(1 << 16, device="cuda")
    measured = measure_calls(lambda: x * 2)
    assert measured.launches == 1
    assert measured.seconds > 0


def test_the_norms_reference_is_launched_operator_by_operator() -> None:
    measured = measure_operator("fused_add_rms_norm", OperatorCall(device="cuda"), 1)
    assert measured.launches >= 11  # a reduction may launch more than one kernel, an operator no fewer
    assert all(kernel.seconds > 0 for kernel in measured.kernels)


def test_a_copy_reaches_a_plausible_bandwidth() -> None:
    assert 5e10 < measure_bandwidth("cuda") < 2e13
