"""`piecework::grouped_matmul`: rows sorted by expert, each group times its own expert's matrix.

Not opaque: it stays inside a piece, where the compiler calls it as it calls a library's product. Torch's own grouped
product compiles for bfloat16 alone, and Transformers' stand-in for the rest is one of the operators whose first call
imports the whole compiler.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.library import register


def grouped_matmul(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Multiply each group of rows by the matrix of its expert.

    Tensors:
        rows    [T, E]     model  sorted by expert
        weight  [N, F, E]  model  one matrix an expert; [N, E, F] where `transposed`
        ends    [N]        i64    rows up to ends[n] belong to experts 0 to n
        ->      [T, F]     model  rows beyond the last end are zero
    """
    matrices = weight if transposed else weight.transpose(1, 2)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        # The loop below reads `ends` on the host, which no captured graph may do.
        product: Tensor = F.grouped_mm(rows, matrices, offs=ends.to(torch.int32))
        return product
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    first = 0
    for expert, end in enumerate(ends.tolist()):
        if end > first:
            torch.mm(rows[first:end], matrices[expert], out=out[first:end])
        first = end
    return out


def _fake(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2] if transposed else weight.shape[1])


register("grouped_matmul(Tensor rows, Tensor weight, Tensor ends, bool transposed) -> Tensor", grouped_matmul, _fake)
