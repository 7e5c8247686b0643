"""Products of few rows with a weight: a C++ kernel that reads the weight once, in place of the library's.

At a handful of rows a product costs what reading the weight costs, and a general matrix product takes two to three
times as long: it copies the weight into blocks first, for rows that are not there. Each row's sum is taken in the same
order whatever the number of rows, so a row's result does not depend on who shares the step with it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from piecework.seam import vocabulary as words
from piecework.seam.cpp_source import CppKernel
from piecework.values.shapes import Box
from piecework.values.signature import Size, TensorSpec
from piecework.values.syntax import parse_python

NAME = "few_rows"
# By the vector instructions, the most rows for which the kernel runs; above them a general product's blocks pay.
MOST = {"avx512": 32, "avx2": 16}

_SOURCE = """\
#include <immintrin.h>
#include <algorithm>
#include <cstdint>
#if defined(__AVX512F__)
using Lane = __m512;
constexpr int64_t kTile = 8;  // rows at a time: as many as have their sums in registers
static inline Lane zero() { return _mm512_setzero_ps(); }
static inline Lane load(const float* p) { return _mm512_loadu_ps(p); }
static inline Lane add(Lane a, Lane b, Lane c) { return _mm512_fmadd_ps(a, b, c); }
static inline float total(Lane a) { return _mm512_reduce_add_ps(a); }
#else
using Lane = __m256;
constexpr int64_t kTile = 4;
static inline Lane zero() { return _mm256_setzero_ps(); }
static inline Lane load(const float* p) { return _mm256_loadu_ps(p); }
static inline Lane add(Lane a, Lane b, Lane c) { return _mm256_fmadd_ps(a, b, c); }
static inline float total(Lane a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
#endif
constexpr int64_t kLane = sizeof(Lane) / sizeof(float);
constexpr int64_t kColumns = 3;

struct Product {
    const float *x, *w, *added;
    float* out;
    int64_t rows, width, depth, x_stride, added_stride, out_stride;
};

template <int64_t Rows, int64_t Columns>
static void block(const Product& p, int64_t row, int64_t column) {
    const float* x = p.x + row * p.x_stride;
    const float* w = p.w + column * p.depth;
    Lane sums[Rows][Columns];
    for (int64_t r = 0; r < Rows; ++r)
        for (int64_t c = 0; c < Columns; ++c) sums[r][c] = zero();
    int64_t k = 0;
    for (; k + kLane <= p.depth; k += kLane) {
        Lane weights[Columns];
        for (int64_t c = 0; c < Columns; ++c) {
            weights[c] = load(w + c * p.depth + k);
            _mm_prefetch(reinterpret_cast<const char*>(w + (c + Columns) * p.depth + k), _MM_HINT_T0);
        }
        for (int64_t r = 0; r < Rows; ++r) {
            const Lane value = load(x + r * p.x_stride + k);
            for (int64_t c = 0; c < Columns; ++c) sums[r][c] = add(value, weights[c], sums[r][c]);
        }
    }
    for (int64_t r = 0; r < Rows; ++r)
        for (int64_t c = 0; c < Columns; ++c) {
            float sum = total(sums[r][c]);
            for (int64_t j = k; j < p.depth; ++j) sum += x[r * p.x_stride + j] * w[c * p.depth + j];
            if (p.added != nullptr) sum += p.added[(row + r) * p.added_stride + column + c];
            p.out[(row + r) * p.out_stride + column + c] = sum;
        }
}

template <int64_t Columns>
static void all_rows(const Product& p, int64_t column) {
    int64_t row = 0;
    for (; row + kTile <= p.rows; row += kTile) block<kTile, Columns>(p, row, column);
    if (kTile > 4 && row + 4 <= p.rows) block<4, Columns>(p, row, column), row += 4;
    switch (p.rows - row) {
        case 3: return block<3, Columns>(p, row, column);
        case 2: return block<2, Columns>(p, row, column);
        case 1: return block<1, Columns>(p, row, column);
    }
}

static void columns(const Product& p, int64_t begin, int64_t end) {
    for (; begin + kColumns <= end; begin += kColumns) all_rows<kColumns>(p, begin);
    for (; begin < end; ++begin) all_rows<1>(p, begin);
}

extern "C" void kernel(
    const float* x, const float* w, const float* added, float* out, const int64_t rows, const int64_t width,
    const int64_t depth, const int64_t x_stride, const int64_t added_stride, const int64_t out_stride) {
    const Product product{x, w, added, out, rows, width, depth, x_stride, added_stride, out_stride};
    constexpr int64_t threads = THREADS;
    if (threads == 1 || rows * width * depth < WORTH_THREADS) return columns(product, 0, width);
    const int64_t share = (width + threads * kColumns - 1) / (threads * kColumns) * kColumns;
#pragma omp parallel for num_threads(THREADS)
    for (int64_t t = 0; t < threads; ++t)
        columns(product, std::min(width, t * share), std::min(width, (t + 1) * share));
}
"""
_WORTH_THREADS = 1 << 17  # products of fewer multiplications end before a second thread has begun
_TYPES = ("const float*", "const float*", "const float*", "float*", *["const int64_t"] * 6)


def few_rows_kernel(threads: int) -> CppKernel:
    """Return the kernel for so many CPU threads.

    Tensors:
        x      [M, K]  float32  rows any number of elements apart
        w      [N, K]  float32  contiguous
        added  [M, N]  float32  rows any number of elements apart, 0 for a bias; address 0 where nothing is added
        out    [M, N]  float32  rows any number of elements apart; is written
    """
    source = _SOURCE.replace("WORTH_THREADS", str(_WORTH_THREADS)).replace("THREADS", str(threads))
    return CppKernel(_TYPES, source)


def use_few_rows(text: str, specs: Mapping[str, TensorSpec], box: Box, vector_isa: str) -> tuple[str, int]:
    """Let products of a stripped text run by the kernel where there are few rows; return the text and their number.

    `specs` are those of the piece's inputs by name. What is not float32, or not known to lie as the kernel reads it,
    stays as it is.
    """
    most = MOST.get(vector_isa.partition(" ")[0], 0)
    if not most:
        return text, 0
    module = parse_python(text)
    functions = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
    call, prepare = functions["call"], functions.get("prepare")
    known = _Layouts({name: _layout_of(spec, box) for name, spec in specs.items()}, most)
    for statement in prepare.body if prepare is not None else []:
        known.learn(statement)
    lines = text.splitlines()
    count = 0
    for statement in call.body:
        known.learn(statement)
        if (line := known.product(statement)) is not None:
            lines[statement.lineno - 1 : statement.end_lineno] = [" " * statement.col_offset + line]
            count += 1
    return "\n".join(lines) + "\n", count


@dataclass(frozen=True)
class _Layout:
    """How a tensor lies: sizes and strides as texts."""

    dtype: str
    size: tuple[str, ...]
    stride: tuple[str, ...]

    @property
    def row_stride(self) -> str | None:
        """The elements between rows of a matrix whose rows are contiguous; None for any other tensor."""
        return self.stride[0] if len(self.size) == 2 and self.stride[1] == "1" and self.dtype == "float32" else None


class _Layouts:
    """What a text says of its tensors, statement by statement."""

    def __init__(self, layouts: Mapping[str, _Layout], most: int) -> None:
        self._layouts = dict(layouts)
        self._most = most

    def learn(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                layout = self._layout(value)
                self._layouts.pop(name, None)
                if layout is not None:
                    self._layouts[name] = layout

    def product(self, statement: ast.stmt) -> str | None:
        """Return a statement that multiplies few rows by the kernel; None where it is no such product."""
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id="mm"), args=[x, w], keywords=[ast.keyword("out", out)])):
                return self._write(None, x, w, out, statement)
            case ast.Expr(
                value=ast.Call(
                    func=ast.Name(id="addmm" | "bias_addmm"), args=[added, x, w], keywords=[ast.keyword("out", out)]
                )
            ):
                return self._write(added, x, w, out, statement)
        return None

    def _write(
        self, added: ast.expr | None, x: ast.expr, w: ast.expr, out: ast.expr, statement: ast.stmt
    ) -> str | None:
        left, right, result = self._layout(x), self._layout(w), self._layout(out)
        if left is None or right is None or result is None or right.dtype != "float32" or len(right.size) != 2:
            return None
        depth, width = right.size
        rows, x_stride, out_stride = result.size[0], left.row_stride, result.row_stride
        is_linear = right.stride == ("1", depth) and depth.isdigit() and width.isdigit()
        if not is_linear or x_stride is None or out_stride is None:
            return None
        if left.size != (rows, depth) or result.size != (rows, width):
            return None
        added_text, added_stride = "0", "0"
        if added is not None:
            if (apart := self._row_stride_of_added(added, rows, width)) is None:
                return None
            added_text, added_stride = ast.unparse(added), apart
        sizes = (rows, width, depth, x_stride, added_stride, out_stride)
        own = f"{NAME}({ast.unparse(x)}, {ast.unparse(w)}, {added_text}, {ast.unparse(out)}, {', '.join(sizes)})"
        if rows.isdigit():
            return own if int(rows) <= self._most else None
        return f"{own} if {rows} <= {self._most} else {ast.unparse(statement)}"

    def _row_stride_of_added(self, node: ast.expr, rows: str, width: str) -> str | None:
        """Return the elements between rows of what is added; a bias is one row for all."""
        layout = self._layout(node)
        if layout is None or layout.dtype != "float32" or layout.stride[-1:] != ("1",):
            return None
        if layout.size == (width,):
            return "0"
        return layout.stride[0] if layout.size == (rows, width) else None

    def _layout(self, node: ast.expr) -> _Layout | None:
        match node:
            case ast.Name(id=name):
                return self._layouts.get(name)
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[size, stride, ast.Name(id=dtype)]):
                return _layout(dtype, size, stride)
            case ast.Call(func=ast.Name(id=words.VIEW), args=[ast.Name(id=base), size, stride, _]):
                known = self._layouts.get(base)
                return _layout(known.dtype, size, stride) if known is not None else None
        return None


def _layout_of(spec: TensorSpec, box: Box) -> _Layout:
    """Return how an input lies; of a contiguous one with more than two dimensions the strides are not looked at."""
    fixed: dict[Size, int] = {symbol: sizes.low for symbol, sizes in box.items() if sizes.is_single}
    size = tuple(str(fixed.get(each, each)) for each in spec.shape)
    if spec.stride is not None:
        return _Layout(spec.dtype, size, tuple(map(str, spec.stride)))
    return _Layout(spec.dtype, size, (*size[1:], "1") if len(size) <= 2 else ("",) * len(size))


def _layout(dtype: str, size: ast.expr, stride: ast.expr) -> _Layout | None:
    if isinstance(size, ast.Tuple) and isinstance(stride, ast.Tuple):
        return _Layout(dtype, tuple(map(ast.unparse, size.elts)), tuple(map(ast.unparse, stride.elts)))
    return None
