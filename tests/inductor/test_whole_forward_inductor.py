"""The whole forward through Inductor in a mode of its own, opaque operators inside, captured by the dry device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import piecework as pw
from capture_toys import DYNAMIC, inputs, toy
from piecework.errors import OptionError


def test_the_whole_forward_of_a_model_that_was_never_compiled(tmp_path: Path) -> None:
    model, store = toy(), pw.DiskStore(tmp_path)
    options = pw.CaptureOptions(decode="full", decode_sizes=(2, 4), prefill="none", whole_forward_max=2)
    given = {"dynamic": DYNAMIC, "max_num_batched_tokens": 64, "device": "dry"}
    replayed = pw.capture(model, inputs(4), options=options, store=store, **given)
    assert len(store.list_records("program")) == 1
    with pw.no_compile():  # found in the store
        again = pw.capture(model, inputs(4), options=options, store=pw.DiskStore(tmp_path), **given)
    torch.testing.assert_close(again(*inputs(2)), model(*inputs(2)))
    for count in (1, 2, 3):
        torch.testing.assert_close(replayed(*inputs(count)), model(*inputs(count)))
    with pytest.raises(OptionError, match="`store` has no meaning here"):
        pw.capture(model, inputs(4), options=pw.CaptureOptions(decode="full", prefill="none"), store=store, **given)
