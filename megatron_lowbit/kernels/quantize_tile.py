"""Device functions: quantization of a side on a tile as one tensor."""

import triton
import triton.language as tl

from megatron_lowbit.kernels.delayed import delayed_amax
from megatron_lowbit.kernels.elements import (
    encode,
    exact_bf16,
    over_block,
    over_rows,
    rounded,
    tile_block_amax,
)
from megatron_lowbit.kernels.hadamard import transform_tile
from megatron_lowbit.kernels.quantize_lanes import quantize_block
from megatron_lowbit.kernels.random_words import number, random_tile
from megatron_lowbit.kernels.scales import fold_scales
from megatron_lowbit.kernels.tiles import apart, store_tile


@triton.jit
def tile_side(
    x, block_amax, row0, col0, R, columns, amax, codes, scales, tensor_scale, key, rows, groups,
    signs,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr, current_amax=None, first_program=0,
):  # fmt: skip
    """Quantize a tile [A, B] of x, or of its TRANSPOSED, which has R rows.

    ``block_amax`` are its blocks' or rows' largest magnitudes, where they are known.
    ``current_amax`` is the tensor's amax for a scale a tensor that is delayed; ``first_program``
    writes the tensor scale.
    """
    H: tl.constexpr = S.transform
    if S.transform is not None:
        x = transform_tile(x, signs, A, B, H)
    if S.from_numbers:
        _split_tile(
            x, row0, col0, R, columns, amax, codes, scales, tensor_scale, key, rows, groups, A, B,
            S, TRANSPOSED, EVEN, first_program,
        )  # fmt: skip
    else:
        _whole_tile(
            x, block_amax, row0, col0, R, columns, amax, codes, scales, tensor_scale, key, rows,
            groups, A, B, S, TRANSPOSED, EVEN, current_amax, first_program,
        )  # fmt: skip


@triton.jit
def _split_tile(
    x, row0, col0, R, columns, amax, codes, scales, tensor_scale, key, rows, groups,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr, first_program,
):  # fmt: skip
    """Quantize a tile that was transformed on the lanes of its blocks."""
    BLOCK: tl.constexpr = S.block
    N: tl.constexpr = A * B // BLOCK
    WIDE: tl.constexpr = A if TRANSPOSED else B // BLOCK
    groups_of_rows = tl.reshape(x, (A, B // BLOCK, BLOCK))
    place = tl.arange(0, N)
    r, group = place // WIDE, place % WIDE
    if TRANSPOSED:
        groups_of_rows = tl.permute(groups_of_rows, (1, 0, 2))
        r, group = group, r
    lanes = apart(tl.reshape(groups_of_rows, (N, BLOCK)), BLOCK)
    if not S.values:
        codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    amax = tl.load(amax) if amax is not None else 0.0
    r += row0
    quantize_block(
        lanes, col0 + group * BLOCK, r, 0, number(rows, r, R), R, columns, amax, codes, scales,
        tensor_scale, key, groups, first_program, WIDE, S, TRANSPOSED, EVEN,
    )  # fmt: skip


@triton.jit
def _whole_tile(
    x, block_amax, row0, col0, R, columns, amax, codes, scales, tensor_scale, key, rows, groups,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr, current_amax, first_program,
):  # fmt: skip
    """Quantize a tile that was transformed as one tensor."""
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    F: tl.constexpr = S.fold
    random = x
    if S.stochastic:
        row_numbers = number(rows, row0 + tl.arange(0, A), R)
        group_numbers = number(groups, col0 // 16 + tl.arange(0, B // 16), tl.cdiv(columns, 16))
        BITS: tl.constexpr = E.random_bits
        random = random_tile(key, row_numbers, group_numbers, A, B, BITS)
    if S.row_scaled:
        r = row0 + tl.arange(0, A)
        if block_amax is None:
            block_amax = tl.load(amax + r, mask=r < R, other=0.0)
        stored, factor, scale, decode = SCALES(block_amax, block_amax, E, OPTIONS)
        x = x * factor[:, None]
        # The tiles of a row have the same; the first writes it.
        if col0 == 0:
            tl.store(scales + r, stored, mask=r < R)
    elif S.block > 1:
        amax = tl.load(amax) * S.bound if amax is not None else 0.0
        if block_amax is None:
            block_amax = tile_block_amax(x, A, B, S.block_rows, S.block)
        stored, factor, scale, decode = SCALES(block_amax, amax, E, OPTIONS)
        x = x * over_block(factor, A, B, S.block_rows, S.block)
        if S.fold is not None:
            scale, decode = fold_scales(scale, decode, amax, S)
            wide = over_block(scale, A, B, S.block_rows, S.block)
            x = rounded(x, random, E, S.stochastic) * wide
            store_tile(codes, encode(x, x, F, False), row0, col0, R, columns, EVEN)
        elif S.values:
            wide = over_block(scale, A, B, S.block_rows, S.block)
            value = rounded(x, random, E, S.stochastic) * wide
            value = exact_bf16(value, E)
            if TRANSPOSED:
                store_tile(codes, tl.trans(value), col0, row0, columns, R, EVEN)
            else:
                store_tile(codes, value, row0, col0, R, columns, EVEN)
        else:
            if stored.dtype == tl.int32:
                stored = over_rows(stored, A, B // S.block, S.block_rows)
            step: tl.constexpr = A // stored.shape[0]
            store_tile(scales, stored, row0 // step, col0 // S.block, tl.cdiv(R, step),
                       columns // S.block, EVEN)  # fmt: skip
    else:
        amax = tl.load(amax) if current_amax is None else delayed_amax(amax, current_amax)
        _, factor, scale, decode = SCALES(amax, amax, E, OPTIONS)
        x = x * factor
    if not S.values and S.fold is None:
        code = encode(x, random, E, S.stochastic)
        if E.bits == 4:
            low, high = tl.split(tl.reshape(code, (A, B // 2, 2)))
            store_tile(codes, low | (high << 4), row0, col0 // 2, R, columns // 2, EVEN)
        else:
            store_tile(codes, code, row0, col0, R, columns, EVEN)
    if tl.program_id(0) == first_program:
        tl.store(tensor_scale, decode)
