"""A kernel counts in 32 bits only where its range says that it may: the range is cut there, and no memory is needed."""

from __future__ import annotations

import pytest

from piecework.compilers.inductor import InductorCompiler
from piecework.values.narrow import kept_box, rest_of
from piecework.values.shapes import Range

pytestmark = pytest.mark.gpu
WIDE = '''def piece(
    s0: "int",
    x0: "float32[s0, 1] cuda",
    w0: "weight float32[1048576] cuda",
):
    v0 = operator.mul(x0, w0)
    return (v0,)
'''


def test_32_bits_up_to_their_end_and_64_beyond() -> None:
    box = {"s0": Range(2, 4096)}
    with InductorCompiler() as compiler:
        narrow = compiler.compile(WIDE, {"s0": Range(2, 1024)})
        assert (narrow.facts["index_width"], narrow.guards) == (32, ())
        artifact = compiler.compile(WIDE, box)
        kept = kept_box(artifact.guards, box)
        assert kept is not None
        if artifact.facts["index_width"] == 32:
            assert kept["s0"].high == 2047
        for rest in rest_of(box, kept):
            other = compiler.compile(WIDE, rest)
            assert (other.facts["index_width"], kept_box(other.guards, rest)) == (64, rest)
        alone = compiler.compile(WIDE, {"s0": Range(4096, 4096)})
        assert alone.facts["index_width"] == 64
