"""What round a compile changes the code that comes out of it: environment variables, and modes of the process.

Variables are an allow-list: what is not on it enters no key. Left out are those whose setting is fixed by us
(`seam/inductor.py`), those that say where files lie, how long something may take or what is logged, and paths.
Settings that code makes in the compiler's configuration need no factor: compilers run in a context of their own, which
does not see them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piecework.errors import TraceError

# Read by torch/_inductor/config.py and its C++ builder when they are imported; a test compares this list with them.
GENERAL = (
    "TORCHDYNAMO_AUTO_FUNCTIONALIZED_V2",
    "TORCHINDUCTOR_APPLY_GUMBEL_MAX_TRICK",
    "TORCHINDUCTOR_ASSUME_UNALIGNED_FALLBACK_OUTPUT",
    "TORCHINDUCTOR_AUTO_CHUNKER",
    "TORCHINDUCTOR_BATCH_INVARIANT",
    "TORCHINDUCTOR_BENCHMARK_EPILOGUE_FUSION",
    "TORCHINDUCTOR_BENCHMARK_FUSION",
    "TORCHINDUCTOR_CHUNKER_NUM_CHUNKS",
    "TORCHINDUCTOR_COALESCE_TILING_ANALYSIS",
    "TORCHINDUCTOR_COMPREHENSIVE_PADDING",
    "TORCHINDUCTOR_DELAY_REALIZE_CHEAP_OUTPUTS",
    "TORCHINDUCTOR_DETERMINISTIC",
    "TORCHINDUCTOR_DISABLED_PASSES",
    "TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_ENABLE_LINEAR_BINARY_FOLDING",
    "TORCHINDUCTOR_FORCE_LAYOUT_OPT",
    "TORCHINDUCTOR_FX_WRAPPER",
    "TORCHINDUCTOR_INPLACE_PADDING",
    "TORCHINDUCTOR_KEEP_OUTPUT_STRIDE",
    "TORCHINDUCTOR_LAYOUT_OPTIMIZATION",
    "TORCHINDUCTOR_LOOP_ORDERING_AFTER_FUSION",
    "TORCHINDUCTOR_LOOP_REINDEXING_AFTER_FUSION",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_SEARCH_SPACE",
    "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE",
    "TORCHINDUCTOR_MEMORY_POOL",
    "TORCHINDUCTOR_MIN_NUM_SPLIT",
    "TORCHINDUCTOR_NATIVE_MATMUL",
    "TORCHINDUCTOR_ONLINE_SOFTMAX",
    "TORCHINDUCTOR_OPTIMIZE_SCATTER_UPON_CONST_TENSOR",
    "TORCHINDUCTOR_PARTITIONED_SCATTER_ENABLED",
    "TORCHINDUCTOR_PATTERN_MATCH_BACKEND",
    "TORCHINDUCTOR_PERMUTE_FUSION",
    "TORCHINDUCTOR_PROLOGUE_FUSION",
    "TORCHINDUCTOR_SHAPE_PADDING",
    "TORCHINDUCTOR_SPLIT_REDUCTIONS",
    "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES",
    "TORCHINDUCTOR_USE_FAST_MATH",
)
CPU = (
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG",
    "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE",
    "TORCHINDUCTOR_CPP_ENABLE_TILING_HEURISTIC",
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG",
    "TORCHINDUCTOR_CPP_FALLBACK_SCATTER_REDUCE_SUM",
    "TORCHINDUCTOR_CPP_FORCE_INLINE_KERNEL",
    "TORCHINDUCTOR_CPP_GEMM_CACHE_BLOCKING",
    "TORCHINDUCTOR_CPP_GEMM_MAX_K_SLICES",
    "TORCHINDUCTOR_CPP_GEMM_THREAD_FACTORS",
    "TORCHINDUCTOR_CPP_MARCH",
    "TORCHINDUCTOR_CPP_MAX_HORIZONTAL_FUSION_SIZE",
    "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE",
    "TORCHINDUCTOR_CPP_NO_REDUNDANT_LOOPS",
    "TORCHINDUCTOR_CPP_USE_CONSTEXPR_FOR_INT_ARRAY",
    "TORCHINDUCTOR_CPP_USE_DECOMPOSE_TANH",
    "TORCHINDUCTOR_CPP_WEIGHT_PREPACK",
    "TORCHINDUCTOR_DEBUG_COMPILE",
    "TORCHINDUCTOR_DEBUG_SYMBOL",
)
GPU = (
    "CUTEDSL_ENABLE_AUTOTUNING",
    "CUTLASS_EPILOGUE_FUSION",
    "DISABLE_LLVM_OPT",
    "DISABLE_MMA_V3",
    "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT",
    "ENABLE_PERSISTENT_TMA_MATMUL",
    "ENABLE_TEMPLATE_TMA_STORE",
    "ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE",
    "TORCHINDUCTOR_AUTOTUNE_CHOICE_DESC_REGEX",
    "TORCHINDUCTOR_AUTOTUNE_CHOICE_NAME_REGEX",
    "TORCHINDUCTOR_COOPERATIVE_REDUCTIONS",
    "TORCHINDUCTOR_COORDINATE_DESCENT_CHECK_ALL_DIRECTIONS",
    "TORCHINDUCTOR_COORDINATE_DESCENT_RADIUS",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "TORCHINDUCTOR_CUTLASS_ALLOWLIST",
    "TORCHINDUCTOR_CUTLASS_DENYLIST",
    "TORCHINDUCTOR_CUTLASS_DYNAMIC_CLUSTER_FALLBACK",
    "TORCHINDUCTOR_CUTLASS_DYNAMIC_CLUSTER_SHAPE",
    "TORCHINDUCTOR_CUTLASS_ENABLED_OPS",
    "TORCHINDUCTOR_CUTLASS_INSTANTIATION_LEVEL",
    "TORCHINDUCTOR_DECOMPOSE_K_THRESHOLD",
    "TORCHINDUCTOR_DECOMPOSE_SORT_OPS",
    "TORCHINDUCTOR_DISTORT_BENCHMARKING_RESULT",
    "TORCHINDUCTOR_DIVISIBLE_BY_16",
    "TORCHINDUCTOR_DYNAMIC_SCALE_RBLOCK",
    "TORCHINDUCTOR_EMIT_POINTER_RANGE_32",
    "TORCHINDUCTOR_ENABLE_PDL",
    "TORCHINDUCTOR_FORCE_FILTER_REDUCTION_CONFIGS",
    "TORCHINDUCTOR_MAX_AUTOTUNE_FLEX_SEARCH_SPACE",
    "TORCHINDUCTOR_MIX_ORDER_REDUCTION",
    "TORCHINDUCTOR_MIX_ORDER_REDUCTION_ALLOW_MULTI_STAGES",
    "TORCHINDUCTOR_MIX_ORDER_REDUCTION_AUTOTUNE_SPLIT_SIZE",
    "TORCHINDUCTOR_MULTI_KERNEL",
    "TORCHINDUCTOR_NESTED_REDUCTION",
    "TORCHINDUCTOR_NUM_DECOMPOSE_K_SPLITS",
    "TORCHINDUCTOR_PERSISTENT_REDUCTIONS",
    "TORCHINDUCTOR_SKIP_L1",
    "TORCHINDUCTOR_UNIQUE_USER_KERNEL_NAMES",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_DISABLE_RESHAPE_ENCODING_INFERENCE",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
)


def variables(device: str) -> tuple[str, ...]:
    """Return the names of the environment variables that may change what is compiled for a type of device."""
    return (*GENERAL, *(GPU if device.partition(":")[0] == "cuda" else CPU))


def modes(device: str) -> dict[str, str]:
    """Return the modes of this process that a compiler asks for; only those that are not torch's own defaults."""
    kind = device.partition(":")[0]
    asked = {
        "float32_matmul_precision": (torch.get_float32_matmul_precision(), "highest"),
        "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled(), False),
        "fp32_precision": (torch.backends.cuda.matmul.fp32_precision, "none") if kind == "cuda" else ("", ""),
        "cudnn_fp32_precision": (torch.backends.cudnn.fp32_precision, "none") if kind == "cuda" else ("", ""),
        "mkldnn": (torch.backends.mkldnn.enabled, True) if kind == "cpu" else ("", ""),
    }
    return {name: str(value) for name, (value, usual) in asked.items() if value != usual}


def surroundings(device: str, given: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the factors of the environment: variables as `given`, and modes of the process."""
    return {"variables": dict(given), "modes": modes(device)}


def refuse_autocast(device: str) -> None:
    """Raise where `torch.autocast` is on round the compile: it is in no graph, so that a program would run without."""
    kind = device.partition(":")[0]
    if torch.is_autocast_enabled(kind):
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        raise TraceError(
            f"`torch.autocast` to `{dtype}` is on round the compile, and would not be round the program's calls",
            hint=f"enter it inside forward, or convert the model: `model.to(torch.{dtype})`",
            facts={"device": kind, "dtype": dtype},
        )
