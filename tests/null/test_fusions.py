"""Models that are, or nearly are, what a pass looks for: each gives what eager gives, whatever was matched or left."""

from __future__ import annotations

import pytest
import torch

from fusion_cases import CASES
from fusion_models import WAYS, Forward, hold_to_eager
from fusion_neighbours import NEAR
from fusion_norms import SPELLED

ALL: dict[str, tuple[Forward, dict[str, int]]] = {**CASES, **NEAR, **SPELLED}


def test_no_case_hides_another() -> None:
    assert len(ALL) == len(CASES) + len(NEAR) + len(SPELLED)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["bfloat16", "float32"]
)
@pytest.mark.parametrize("name", ALL)
def test_a_case_gives_what_eager_gives(name: str, dtype: torch.dtype) -> None:
    hold_to_eager(*ALL[name], dtype)


@pytest.mark.parametrize(("compiler", "partition"), WAYS)
@pytest.mark.parametrize("name", ALL)
def test_it_does_so_however_it_is_cut_and_compiled(name: str, compiler: str, partition: str) -> None:
    hold_to_eager(*ALL[name], torch.bfloat16, compiler=compiler, partition=partition)
