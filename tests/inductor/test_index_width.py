"""Which integers a kernel counts elements with: decided for each range from its largest size, and kept as a fact."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from piecework.compilers.inductor import InductorCompiler
from piecework.seam.cpp_source import CppKernel
from piecework.seam.kernels import index_width
from piecework.values.narrow import kept_box, rest_of
from piecework.values.shapes import Range

WIDE = '''def piece(
    s0: "int",
    x0: "float32[s0, 1] cpu",
    w0: "weight float32[1048576] cpu",
):
    v0 = operator.mul(x0, w0)
    return (v0,)
'''
MOST = 2**31 - 1


def test_a_processor_counts_in_64_bits_whatever_the_range(tmp_path: Path) -> None:
    """4,096 rows of 2**20 elements pass 2**31; nothing of that size is made to see how it would be counted."""
    compiler = InductorCompiler(threads=1, working_folder=str(tmp_path))
    artifact = compiler.compile(WIDE, {"s0": Range(2, 4096)})
    assert (artifact.facts["index_width"], artifact.guards) == (64, ())


def test_a_loop_over_narrow_integers_is_seen() -> None:
    body = "for(int64_t x0=0; x0<ks0; x0+=1) {{ for({} x1=0; x1<4; x1+=1) {{}} }}"
    assert index_width(CppKernel((), body.format("int64_t"))) == 64
    assert index_width(CppKernel((), body.format("int"))) == 32


def test_a_gpu_kernel_says_it_in_its_signature() -> None:
    def kernel(size: str) -> SimpleNamespace:
        signature = {"in_ptr0": "*fp32", "out_ptr0": "*i64", "ks0": size, "xnumel": size, "XBLOCK": "constexpr"}
        return SimpleNamespace(triton_meta={"signature": signature})

    assert (index_width(kernel("i32")), index_width(kernel("i64"))) == (32, 64)


def test_where_32_bits_were_assumed_the_range_ends_there() -> None:
    """What the compiler leaves when it counts in 32 bits because the size it judged by was small."""
    box = {"s0": Range(2, 4096)}
    kept = kept_box((f"1048576*s0 <= {MOST}",), box)
    assert kept == {"s0": Range(2, 2047)}
    assert rest_of(box, kept) == [{"s0": Range(2048, 4096)}]
