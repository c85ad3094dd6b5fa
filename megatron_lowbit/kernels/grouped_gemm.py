"""Products of many pairs of matrices by one launch, such as of all experts of a layer.

Operands and results go through Hopper's tensor memory accelerator, which cuts off what lies outside
of a matrix. FP8 tiles with scales are read by addresses: a program reads so little of them that
descriptors cost more than they save. FP8 without block scales, whose operands are parts of one
matrix per side, has a kernel of its own (``grouped_kernels.py``).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from megatron_lowbit.kernels.device_tables import Entries, make_table
from megatron_lowbit.kernels.grouped_kernels import (
    NOT_STACKED,
    STEPS,
    grouped_kernel,
    stacked_kernel,
)
from megatron_lowbit.kernels.launcher import cdiv, multiprocessors, table_launcher
from megatron_lowbit.kernels.of_counts import Numbers, OfCounts, smaller_of, sum_of, unless_empty
from megatron_lowbit.kernels.operand_group import Matrices, OperandGroup, decode, matrices_of
from megatron_lowbit.kernels.routes import EXACT, FOLDED, TENSORS, TILES, Route
from megatron_lowbit.kernels.split import ColumnSlices, RowSlices, SeparateMatrices
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tensor

_BF16, _BF16_FEW, _FP8_TILES = (128, 256, 64, 8, 3), (128, 128, 64, 4, 2), (64, 128, 128, 4, 3)
"""Rows, columns and terms that a program computes at a time, warps and stages: of BF16, and of FP8
tiles with scales, whose products take registers in addition to their sums. Where products have few
terms, programs end soon: several on a multiprocessor hide one another's beginning and end. Measured
on an H100 and an H200."""
_FEW_TERMS = 512
"""Mean terms up to which products of BF16 have few."""
_STACKED = {torch.bfloat16: (2, 2, 4), torch.float32: (1, 1, 8)}
"""Programs per multiprocessor, parts of a tile of 128 x 128 x 128, and warps, by the result's
dtype; found by trying on an H200 and an H100. Results in FP32, and what they are added to, leave no
room for two programs."""
_OUTSIDE = 2**30
"""Column behind all of a matrix, where zeros are read."""
LOOP_FROM = 2**36
"""FLOPs of a product from which cuBLAS computes it faster by itself."""


def grouped_pair(
    route: Route, lhs: Sequence[Any], rhs: Sequence[Any], outs: SeparateMatrices
) -> tuple[Matrices, Matrices] | None:
    """Return operands of a route as matrices that one launch multiplies; None for a launch each."""
    if _are_large(lhs, outs):
        return None
    left = right = None
    if route is EXACT:
        left, right = _exact(lhs), _exact(rhs)
    elif route in (TENSORS, FOLDED, TILES):
        left, right = _fp8(lhs, route, 1), _fp8(rhs, route, TILE)
    if left is None or right is None or not (left.aligned and right.aligned and outs.aligned):
        return None
    takes_layout = route is EXACT or (left.by_rows and right.by_rows)
    step = outs.template.shape[1] * outs.template.itemsize
    return (left, right) if takes_layout and step % 16 == 0 else None


def _are_large(lhs: Sequence[Any], outs: SeparateMatrices) -> bool:
    """Return True where a launch for each is faster; counts on a device come for one launch."""
    rows, terms = outs.rows.numbers, _terms(lhs)
    if isinstance(rows, OfCounts) or isinstance(terms, OfCounts):
        return False
    return 2 * int(rows @ terms) * outs.template.shape[1] >= LOOP_FROM * len(outs)


def _terms(side: Sequence[Any]) -> Numbers:
    if isinstance(side, OperandGroup):
        return side.terms
    if isinstance(side, RowSlices):
        return np.full(len(side), side.template.shape[1])
    if isinstance(side, ColumnSlices):
        return side.of.rows.numbers
    return np.array([x.shape[1] if isinstance(x, Tensor) else 0 for x in side])


def _fp8(side: Sequence[Any], route: Route, tile_rows: int) -> Matrices | None:
    """Return FP8 operands; None for those in another form, which are folded one by one."""
    if not isinstance(side, OperandGroup) or side.transposes:
        return None
    format = side.layout.operand.format
    fits = format.block_rows == tile_rows if route is TILES else isinstance(format, FP8Tensor)
    return side.matrices if fits else None


def _exact(side: Sequence[Any]) -> Matrices | None:
    """Return exact operands as BF16 matrices, decoded if they are codes."""
    if isinstance(side, OperandGroup):
        return side.matrices if side.layout.values else decode(side)
    tensors = isinstance(side, (RowSlices, ColumnSlices)) or all(
        isinstance(x, Tensor) for x in side
    )
    return matrices_of(side) if tensors else None


def multiply_groups(lhs: Matrices, rhs: Matrices, outs: SeparateMatrices, beta: bool) -> None:
    """Write each ``lhs_i @ rhs_i.T``, times factors and scales, to out_i, or add it to that.

    Sums are in FP32, promoted every 128 products on FP8 tensor cores, and rounded once.

    Args:
        lhs: (M_i, K_i) in BF16, or FP8.
        rhs: (N_i, K_i) in BF16, or FP8. Where FP8 tiles have scales, left ones are 1x128 and
            right ones 128x128. Without scales, either side's are parts of one matrix: behind the
            terms of either are zeros, or its matrix ends.
        outs: (M_i, N_i), contiguous, all FP32 or all BF16.
        beta: True to add to what is there.
    """
    # Triton's descriptors need memory on the device, for each launch.
    triton.set_allocator(_scratch)
    terms = smaller_of(lhs.terms, rhs.terms)
    scaled = lhs.scales is not None
    fields: tuple[Entries, ...] = (
        outs.addresses, lhs.rows, rhs.rows, lhs.factors, rhs.factors
    )  # fmt: skip
    templates = lhs.template, rhs.template, outs.template
    device = lhs.template.device
    if lhs.template.element_size() == 1 and not scaled:
        kernel, stages = stacked_kernel, 3
        occupancy, parts, warps = _STACKED[outs.template.dtype]
        # A product without terms is a step outside of both matrices, where zeros are read.
        steps = unless_empty(cdiv(terms, 128), terms, 1)
        tiles = cdiv(lhs.rows, 128) * cdiv(rhs.rows, 128)
        fields += (steps, *_rows_of_results(outs), *_stack(lhs, terms), *_stack(rhs, terms))
        programs = min(occupancy * multiprocessors(device), max(1, sum_of(tiles)))
        table = make_table(tiles, fields, device, STEPS.value, programs)
        constants = 128 // parts, 128, 128, parts, beta, table.count
    else:
        kernel = grouped_kernel
        has_few_terms = sum_of(terms) <= _FEW_TERMS * len(outs)
        *tile, warps, stages = _FP8_TILES if scaled else _BF16_FEW if has_few_terms else _BF16
        fields += (
            terms, lhs.addresses, lhs.steps, lhs.scales if scaled else 0,
            rhs.addresses, rhs.steps, rhs.scales if scaled else 0,
        )  # fmt: skip
        tiles = cdiv(lhs.rows, tile[0]) * cdiv(rhs.rows, tile[1])
        table = make_table(tiles, fields, device)
        programs = table.programs
        constants = *tile, lhs.by_rows, rhs.by_rows, scaled, beta, table.count
    options = ("num_warps", warps), ("num_stages", stages)
    types = *(template.dtype for template in templates), table.entries.device
    launch = table_launcher(kernel, constants, options, (1, 2, 3), *types)
    launch((table.entries, *templates), programs)


def _stack(side: Matrices, terms: Numbers) -> tuple[Entries, ...]:
    """Return a side's entries of the table."""
    assert side.stack is not None
    rows, columns, first_rows, first_columns = side.stack
    first_columns = unless_empty(first_columns, terms, _OUTSIDE)
    return side.template.data_ptr(), rows, columns, first_rows, first_columns


def _rows_of_results(outs: SeparateMatrices) -> tuple[int, Numbers]:
    """Return the lowest address of all results, and each one's row from there on."""
    if isinstance(outs, RowSlices):
        return outs.matrix.data_ptr(), outs.rows.in_units(1).before
    addresses, step = outs.addresses, outs.template.shape[1] * outs.template.itemsize
    first = int(addresses.min())
    rows, rest = np.divmod(addresses - first, step)
    stacked = (rest == 0) & (rows < NOT_STACKED.value)
    return first, np.where(stacked, rows, NOT_STACKED.value)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
