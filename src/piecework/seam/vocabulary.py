"""What a stripped text may name: the compiler's words, each with the path where the loader finds it.

The list is closed on purpose. A word that is not in it may hide a call of the compiler or a convention
that we do not know; the stripper then refuses, and the piece runs by torch's own path.
"""

from __future__ import annotations


class Refusal(Exception):
    """The output code holds something that the grammar does not know; the message names it."""


ALLOCATORS = {
    "empty_strided_cpu": "torch._C._dynamo.guards._empty_strided_cpu",
    "empty_strided_cpu_pinned": "torch._C._dynamo.guards._empty_strided_cpu_pinned",
    "empty_strided_cuda": "torch._C._dynamo.guards._empty_strided_cuda",
    "empty_strided": "torch.empty_strided",
}
VIEW = "reinterpret_tensor"
STREAM = "get_raw_stream"
# Copies a tensor whose address is no multiple of 16 bytes, which Triton's kernels take for granted.
ALIGN = "copy_if_misaligned"
CHECK_ALIGNED = "check_aligned"
FUNCTIONS = {
    **ALLOCATORS,
    VIEW: "torch._C._dynamo.guards._reinterpret_tensor",
    ALIGN: "copy_if_misaligned",
    CHECK_ALIGNED: "check_aligned",
    STREAM: "torch._C._cuda_getCurrentRawStream",
}

# What the compiler calls by `extern_kernels.NAME`; all are functions of torch itself.
EXTERN = {
    "mm": "torch.mm",
    "bmm": "torch.bmm",
    "addmm": "torch.addmm",
    "bias_addmm": "bias_addmm",
    "baddbmm": "torch.baddbmm",
    "mm_dtype": "torch.mm",
    "bmm_dtype": "torch.bmm",
    "_int_mm": "torch._int_mm",
    "_scaled_mm": "torch._scaled_mm",
    "_grouped_mm": "torch._grouped_mm",
    "_scaled_grouped_mm": "torch._scaled_grouped_mm",
    "_weight_int8pack_mm": "torch._weight_int8pack_mm",
    "convolution": "torch.convolution",
    "_mm_plus_mm": "torch.ops.inductor._mm_plus_mm",
}

# Operator namespaces that C++ registers when torch is imported; any other needs its module imported first.
NATIVE_NAMESPACES = frozenset(
    ("aten", "prims", "mkldnn", "mkl", "onednn", "quantized", "_quantized", "inductor", "_c10d_functional", "symm_mem")
)
# Of `torch.ops.inductor`, only these are C++; the others exist once the compiler is imported.
NATIVE_INDUCTOR_OPS = frozenset(("_mm_plus_mm", "_reinterpret_tensor", "_alloc_from_pool"))
SCALAR_FUNCTIONS = frozenset(("max", "min", "int", "float", "bool", "abs"))
MATH_FUNCTIONS = frozenset(("floor", "ceil", "trunc", "sqrt", "log2", "pow"))
TENSOR_METHODS = frozenset(("item", "size", "stride", "copy_", "zero_", "fill_"))
DTYPES = frozenset(
    """
    float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
    int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128
    """.split()
)
# `assert_*` calls check what our own signature check and guards hold already.
DROPPED = frozenset(
    ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment", "run_intermediate_hooks")
)
CONSTANT_NAMES = frozenset(("inf", "nan"))
