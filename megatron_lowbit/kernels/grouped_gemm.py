"""Products of many pairs of matrices by one launch, such as those of all experts of a layer.

A program computes a tile of one product, which it finds in a table (``sections.py``). Large
operands and results go through Hopper's tensor memory accelerator, which cuts off what lies outside
of a matrix. FP8 tiles with scales are read by addresses: a program reads so little of them that
descriptors cost more than they save. FP8 without block scales, whose operands are parts of one
matrix a side, is multiplied by ``stacked_gemm.py``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv, table_launcher
from megatron_lowbit.kernels.operand_group import (
    Matrices,
    OperandGroup,
    TransposedGroup,
    decode,
    matrices_of,
)
from megatron_lowbit.kernels.routes import EXACT, FOLDED, TENSORS, TILES, Route
from megatron_lowbit.kernels.sections import entry, pointer, section_of, table_of
from megatron_lowbit.kernels.split import RowSlices, SeparateMatrices
from megatron_lowbit.kernels.stacked_gemm import Tile, factor_of, multiply_stacked, place_of_tile
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tensor

A, B, OUT, ROWS, COLUMNS, TERMS = (tl.constexpr(i) for i in range(1, 7))
A_STEP, B_STEP, A_FACTOR, B_FACTOR, A_SCALES, B_SCALES = (tl.constexpr(i) for i in range(7, 13))
_FIELDS = tl.constexpr(13)
"""Rows of the table of products, after the first tiles; their number."""
_SCALED = tl.constexpr(128)
"""Products to a scale of FP8 tiles."""


_BF16, _BF16_FEW = Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 2)
_FP8_TILES = Tile(64, 128, 128, 4, 3)
"""Tiles of BF16, and of FP8 tiles with scales, whose products take registers beside their sums.
Where products have few terms, programs end soon: several on a multiprocessor hide one another's
beginning and end. Found by trying on an H100 and an H200."""
_FEW_TERMS = 512
"""Mean terms up to which products of BF16 have few."""
LOOP_FROM = 2**36
"""FLOPs of a product from which cuBLAS computes it faster by itself."""


def grouped_pair(
    route: Route, lhs: Sequence[Any], rhs: Sequence[Any], outs: RowSlices | SeparateMatrices
) -> tuple[Matrices, Matrices] | None:
    """Return operands of a route as matrices that one launch multiplies; None for a launch each."""
    products = int(outs.rows.numbers @ _terms(lhs))
    if 2 * products * outs.template.shape[1] >= LOOP_FROM * len(outs):
        return None
    pair = None
    if route is EXACT:
        pair = _exact(lhs), _exact(rhs)
    elif route in (TENSORS, FOLDED, TILES):
        pair = _fp8(lhs, route, 1), _fp8(rhs, route, TILE)
    if pair is None or pair[0] is None or pair[1] is None or not _takes(*pair, outs):
        return None
    return pair[0], pair[1]


def _terms(side: Sequence[Any]) -> np.ndarray:
    if isinstance(side, OperandGroup):
        return side.places.terms
    if isinstance(side, TransposedGroup):
        return side.of.places.rows
    if isinstance(side, RowSlices):
        return np.full(len(side), side.whole.shape[1])
    return np.array([x.shape[1] if isinstance(x, Tensor) else 0 for x in side])


def _fp8(side: Sequence[Any], route: Route, tile_rows: int) -> Matrices | None:
    """Return FP8 operands; None for those in another form, which are folded one by one."""
    if not isinstance(side, OperandGroup):
        return None
    format = side.layout.format
    if route is TILES:
        return matrices_of(side) if format.block_rows == tile_rows else None
    return matrices_of(side) if isinstance(format, FP8Tensor) else None


def _exact(side: Sequence[Any]) -> Matrices | None:
    """Return exact operands as BF16 matrices, decoded if they are codes."""
    if isinstance(side, TransposedGroup):
        whole = _exact(side.of)
        return whole and whole.transpose()
    if isinstance(side, OperandGroup):
        return matrices_of(side) if side.layout.values else decode(side)
    tensors = isinstance(side, RowSlices) or all(isinstance(x, Tensor) for x in side)
    return matrices_of(side) if tensors else None


def _takes(lhs: Matrices, rhs: Matrices, outs: RowSlices | SeparateMatrices) -> bool:
    """Return True if the kernel takes these matrices."""
    step = outs.template.shape[1] * outs.template.element_size()
    wide = lhs.template.element_size() == 2 and rhs.template.element_size() == 2
    return (
        lhs.aligned
        and rhs.aligned
        and (wide or (lhs.by_rows and rhs.by_rows))
        and step % 16 == 0
        and outs.aligned
    )


def multiply_groups(
    lhs: Matrices, rhs: Matrices, outs: RowSlices | SeparateMatrices, beta: bool
) -> None:
    """Write each ``lhs_i @ rhs_i.T``, times factors and scales, to out_i, or add it to that.

    Sums are in FP32, those of FP8 tensor cores every 128 products, and rounded once.

    Args:
        lhs: (M_i, K_i) in BF16, or FP8.
        rhs: (N_i, K_i) in BF16, or FP8. Where FP8 tiles have scales, left ones are 1x128 and
            right ones 128x128.
        outs: (M_i, N_i), contiguous, all FP32 or all BF16.
        beta: True to add to what is there.
    """
    # Triton's descriptors need memory on the device, for each launch.
    triton.set_allocator(_scratch)
    scaled = lhs.scales is not None
    if lhs.template.element_size() == 1 and not scaled:
        multiply_stacked(lhs, rhs, outs, beta)
        return
    terms = np.minimum(lhs.terms, rhs.terms)
    has_few_terms = terms.sum() <= _FEW_TERMS * len(terms)
    tile = _FP8_TILES if scaled else _BF16_FEW if has_few_terms else _BF16
    fields = (
        lhs.addresses, rhs.addresses, outs.addresses, lhs.rows, rhs.rows, terms,
        lhs.steps, rhs.steps, lhs.factors, rhs.factors,
        lhs.scales if scaled else 0, rhs.scales if scaled else 0,
    )  # fmt: skip
    tiles = cdiv(lhs.rows, tile.rows) * cdiv(rhs.rows, tile.columns)
    table = table_of(tiles, fields, lhs.template.device)
    constants = (
        tile.rows, tile.columns, tile.terms, lhs.by_rows, rhs.by_rows, scaled, beta, table.count,
    )  # fmt: skip
    kinds = lhs.template, rhs.template, outs.template
    options = ("num_warps", tile.warps), ("num_stages", tile.stages)
    dtypes = [kind.dtype for kind in kinds]
    device = table.entries.device
    launch = table_launcher(grouped_gemm_kernel, constants, options, (1, 2, 3), *dtypes, device)
    launch((table.entries, *kinds), table.programs)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


@triton.jit
def grouped_gemm_kernel(
    table, a_like, b_like, out_like,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr, SCALED: tl.constexpr, ADDS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one of the products of a table in COUNT columns.

    ``a_like``, ``b_like`` and ``out_like`` tell dtypes.
    """
    tile = tl.program_id(0)
    i = section_of(table, tile, _FIELDS, COUNT)
    tile -= tl.load(table + i).to(tl.int32)
    rows = entry(table, i, ROWS, COUNT).to(tl.int32)
    columns = entry(table, i, COLUMNS, COUNT).to(tl.int32)
    terms = entry(table, i, TERMS, COUNT).to(tl.int32)
    row0, col0 = place_of_tile(tile, rows, columns, TM, TN)
    if SCALED:
        a = _addresses(table, i, A, A_STEP, a_like, row0, TM, TK, COUNT)
        b = _addresses(table, i, B, B_STEP, b_like, col0, TN, TK, COUNT)
    else:
        a = _descriptor(table, i, A, A_STEP, a_like, rows, terms, TM, TK, A_BY_ROWS, COUNT)
        b = _descriptor(table, i, B, B_STEP, b_like, columns, terms, TN, TK, B_BY_ROWS, COUNT)
    sums = tl.zeros((TM, TN), dtype=tl.float32)
    if SCALED:
        row = row0 + tl.arange(0, TM)
        left_scales = entry(table, i, A_SCALES, COUNT).to(tl.pointer_type(tl.float32)) + row
        right_scales = entry(table, i, B_SCALES, COUNT).to(tl.pointer_type(tl.float32))
        right_scales += col0 // _SCALED * tl.cdiv(terms, _SCALED)
        # Scales are asked for a step ahead: only loads of the operands are pipelined.
        scale = _scale(left_scales, right_scales, row < rows, terms > 0)
        for k0 in tl.range(0, terms, TK):
            left_scales += rows
            right_scales += 1
            following = _scale(left_scales, right_scales, row < rows, k0 + TK < terms)
            left = _load(a, row0, k0, rows, terms, TM, TK, A_BY_ROWS)
            right = _load(b, col0, k0, columns, terms, TN, TK, B_BY_ROWS)
            sums += tl.dot(left, right.T) * scale[:, None]
            scale = following
    else:
        for k0 in tl.range(0, terms, TK):
            left = _load(a, row0, k0, rows, terms, TM, TK, A_BY_ROWS)
            right = _load(b, col0, k0, columns, terms, TN, TK, B_BY_ROWS)
            sums = tl.dot(left, right.T, sums)
        sums *= factor_of(table, i, A_FACTOR, COUNT) * factor_of(table, i, B_FACTOR, COUNT)
    start = pointer(table, i, OUT, COUNT, out_like)
    if ADDS or not SCALED:
        out = tl.make_tensor_descriptor(start, [rows, columns], [columns.to(tl.int64), 1], [TM, TN])
        if ADDS:
            sums += out.load([row0, col0]).to(tl.float32)
        out.store([row0, col0], sums.to(out_like.dtype.element_ty))
    else:
        row, column = row0 + tl.arange(0, TM), col0 + tl.arange(0, TN)
        step = _in_16_bytes(columns, out_like)
        places = start + row.to(tl.int64)[:, None] * step + column[None, :]
        inside = (row < rows)[:, None] & (column < step)[None, :]
        tl.store(places, sums.to(out_like.dtype.element_ty), mask=inside)


@triton.jit
def _descriptor(
    table, i, PLACE: tl.constexpr, STEP: tl.constexpr, template, rows, terms, TR: tl.constexpr,
    TK: tl.constexpr, BY_ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Describe a matrix (rows, terms), which is read in tiles (TR, TK)."""
    start, step = pointer(table, i, PLACE, COUNT, template), entry(table, i, STEP, COUNT)
    if BY_ROWS:
        return tl.make_tensor_descriptor(start, [rows, terms], [step, 1], [TR, TK])
    else:
        return tl.make_tensor_descriptor(start, [terms, rows], [step, 1], [TK, TR])


@triton.jit
def _addresses(
    table, i, PLACE: tl.constexpr, STEP: tl.constexpr, template, row0, TR: tl.constexpr,
    TK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Return the addresses of the first tile (TR, TK) of some rows."""
    start, step = pointer(table, i, PLACE, COUNT, template), entry(table, i, STEP, COUNT)
    row = (row0 + tl.arange(0, TR)).to(tl.int64)
    return start + row[:, None] * _in_16_bytes(step, template) + tl.arange(0, TK)[None, :]


@triton.jit
def _load(matrix, row0, k0, rows, terms, TR: tl.constexpr, TK: tl.constexpr, BY_ROWS: tl.constexpr):
    """Load a tile (TR, TK) by its descriptor or its addresses.

    By addresses 16 bytes are read at once: codes behind the last term are zero up to there.
    """
    if matrix.dtype.is_ptr():
        row, term = row0 + tl.arange(0, TR), k0 + tl.arange(0, TK)
        inside = (row < rows)[:, None] & (term < tl.cdiv(terms, 16) * 16)[None, :]
        return tl.load(matrix + k0, mask=inside, other=0.0)
    elif BY_ROWS:
        return matrix.load([row0, k0])
    else:
        return matrix.load([k0, row0]).T


@triton.jit
def _in_16_bytes(step, template):
    """Return a number of elements, which fill whole 16 bytes, in a form that tells Triton so."""
    elements: tl.constexpr = 128 // template.dtype.element_ty.primitive_bitwidth
    return step // elements * elements


@triton.jit
def _scale(left, right, row_inside, inside):
    """Return the scales (TM) of products of 1x128 and 128x128 tiles."""
    left_scale = tl.load(left, mask=row_inside & inside, other=0.0)
    return left_scale * tl.load(right, mask=inside, other=0.0)
