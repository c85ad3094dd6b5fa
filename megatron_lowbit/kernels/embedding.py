"""Addition of a token embedding's gradient to its main gradient, in the rows of its tokens only.

Tokens are sorted by id; ids that follow one another are summed by one program for each part of the
columns. Sums are in the order of the tokens, so that a run has the same bits each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.elements import as_dtype
from megatron_lowbit.kernels.launcher import cdiv

_COLUMNS = 1024
_AT_ONCE = 8
"""Rows that a program reads at the same time: expected for 16384 tokens of one id are 2048 waits of
about 0.9 µs for memory, 2 ms, in place of 15."""


def add_rows(sums: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add rows to the rows of ``sums`` with their ids; see :meth:`Engine.add_rows`.

    It moves 2 bytes per element of BF16 rows and 8 of each FP32 row of ``sums`` with an id: 8192
    tokens of 2500 ids with 4096 columns are 149 MB, 0.04 ms at an H200's 4.25 TB/s.
    """
    tokens, columns = rows.shape
    if not tokens:
        return
    ids, order = torch.sort(ids.int(), stable=True)
    _add_rows_kernel[tokens, cdiv(columns, _COLUMNS)](
        sums, ids, order, rows.contiguous(), tokens, columns, _COLUMNS, _AT_ONCE
    )


@triton.jit
def _add_rows_kernel(
    sums, ids, order, rows, tokens, C, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Add the rows of an id, if it is the first of its kind, to COLUMNS of ``sums``.

    ``ids`` are sorted, those to skip -1; ``order`` are their tokens.
    """
    at = tl.program_id(0)
    id = tl.load(ids + at)
    if id != tl.load(ids + at - 1, mask=at > 0, other=-1):
        col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), tl.float32)
        while tl.load(ids + at, mask=at < tokens, other=-1) == id:
            for i in tl.static_range(AT_ONCE):
                is_in = at + i < tokens
                same = tl.load(ids + at + i, mask=is_in, other=-1) == id
                token = tl.load(order + at + i, mask=is_in, other=0)
                row = tl.load(rows + token * C + col, mask=same & (col < C), other=0.0)
                total += row.to(tl.float32)
            at += AT_ONCE
        own = sums + id.to(tl.int64) * C + col
        total += tl.load(own, mask=col < C).to(tl.float32)
        tl.store(own, as_dtype(total, own.dtype.element_ty), mask=col < C)
