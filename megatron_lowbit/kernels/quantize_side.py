"""Device functions: quantization of a side, on lanes (see ``tiles.py``) or on a tile as one tensor.

``side`` are its SideArguments and ``S`` its QuantizeSpec; R is the number of its rows.
"""

import triton
import triton.language as tl

from megatron_lowbit.kernels.amax import delayed_amax
from megatron_lowbit.kernels.block_codes import bf16_of
from megatron_lowbit.kernels.elements import (
    abs_bits,
    append_code,
    encode,
    encode_four,
    exact_bf16,
    larger,
    over_block,
    rounded,
)
from megatron_lowbit.kernels.hadamard import transform_lanes, transform_tile
from megatron_lowbit.kernels.random_words import number, philox, random_of, random_tile
from megatron_lowbit.kernels.scales import fold_scales
from megatron_lowbit.kernels.tiles import apart, side_by_side, store_groups, store_tile


@triton.jit
def lanes_side(
    lanes, r, group, R, side, first_program, WIDE: tl.constexpr, S: tl.constexpr,
    TRANSPOSED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize groups of lanes: the ``group``-th of row ``r`` of x, or of its TRANSPOSED.

    Groups come in the order of the tile, which has ``WIDE`` of them from left to right.
    """
    H: tl.constexpr = S.transform
    P: tl.constexpr = S.lanes
    BLOCK: tl.constexpr = S.block
    if S.transform is not None:
        lanes = transform_lanes(lanes, side.signs, P, H)
    amax = _largest_possible(side, r, R, S)
    row_number = number(side.rows, r, R)
    if P <= BLOCK:
        quantize_block(lanes, 0, r, group, row_number, R, amax, side, first_program, WIDE, S,
                       TRANSPOSED, EVEN)  # fmt: skip
    else:
        # Loops, for Triton's sake: compiled once for many blocks, and apart from the transform.
        # Two, as each block moves the lanes that its loop holds.
        HALF: tl.constexpr = P // 2
        for half in tl.static_range(0, P, HALF):
            rest = lanes[half : half + HALF]
            for first in range(half, half + HALF, BLOCK):
                quantize_block(rest, first, r, group, row_number, R, amax, side, first_program,
                               WIDE, S, TRANSPOSED, EVEN)  # fmt: skip
                rest = rest[BLOCK:] + rest[:BLOCK]


@triton.jit
def _largest_possible(side, r, R, S: tl.constexpr):
    """Load the magnitude that no element, or none of row ``r``, exceeds; 0 where it has no use."""
    if side.amax is None:
        return 0.0
    elif S.row_scaled:
        return tl.load(side.amax + r, mask=r < R, other=0.0)
    else:
        return tl.load(side.amax) * S.bound


@triton.jit
def quantize_block(
    lanes, first, r, group, row_number, R, amax, side, first_program, WIDE: tl.constexpr,
    S: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize the first block of ``lanes``, or all of them where a block has several groups.

    ``first`` is the place of the first lane in its group, or in its row where ``group`` is 0.
    """
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    BLOCK: tl.constexpr = S.block
    ROWS: tl.constexpr = S.block_rows
    LENGTH: tl.constexpr = S.block_lanes
    columns = side.columns
    block_amax = _block_amax_of(lanes, LENGTH, WIDE, S, TRANSPOSED)
    if S.from_numbers:
        at = group * S.lanes + first
        BELOW: tl.constexpr = 1 if TRANSPOSED else WIDE
        group_number = number(side.groups, at // 16, tl.cdiv(columns, 16))
        outs, stored, scale, decode = SCALES(
            lanes, block_amax, amax, side.key, group_number, row_number, BELOW, S
        )
        if S.values:
            outs = bf16_of(outs, scale, E)
    else:
        stored, factor, scale, decode = SCALES(block_amax, amax, E, OPTIONS)
        if S.fold is not None:
            scale, decode = fold_scales(scale, decode, amax, S)
        at = group * S.lanes + first
        outs = _encoded(lanes, factor, scale, at, row_number, side, LENGTH, S)
    if S.values and TRANSPOSED:
        # One store in a loop compiles sooner than many: see load_column_lanes.
        for i in range(0, LENGTH):
            store_groups(side.codes, outs[0][:, None], at + i, r, columns, R, EVEN)
            outs = outs[1:] + outs[:1]
    elif S.values:
        store_groups(side.codes, side_by_side(outs, LENGTH), r, at, R, columns, EVEN)
    else:
        PER: tl.constexpr = 8 if E.bits == 4 and S.fold is None else 4
        packed = side_by_side(outs, LENGTH // PER)
        store_groups(side.codes, packed, r, at // PER, R, columns // PER, EVEN)
        if S.from_numbers and BLOCK > LENGTH:
            _store_both_scales(stored, at, r, R, side, LENGTH, S)
        elif S.fold is None and S.repeats_scales:
            store_groups(side.scales, stored[:, None], r, at // BLOCK, R, columns // BLOCK, EVEN)
        elif S.fold is None:
            # Scales of 1xN blocks with rows fastest; one of each block.
            block = at // BLOCK
            index = r // ROWS * (columns // BLOCK) + block if ROWS > 1 else block * R + r
            first_of_block = (at % BLOCK == 0) & (r % ROWS == 0) & (r < R) & (at < columns)
            tl.store(side.scales + index, stored, mask=first_of_block)
    if S.row_scaled:
        tl.store(side.tensor_scale + r, decode, mask=(at == 0) & (r < R))
    elif tl.program_id(0) == first_program:
        # Every program has the same; the first writes it.
        tl.store(side.tensor_scale, decode)


@triton.jit
def _store_both_scales(stored, at, r, R, side, LENGTH: tl.constexpr, S: tl.constexpr):
    """Store the scale bytes of LENGTH elements behind the four of their block."""
    BLOCK: tl.constexpr = S.block
    BYTES: tl.constexpr = 4 + BLOCK // LENGTH
    inner, outer = stored
    start = side.scales + (r.to(tl.int64) * (side.columns // BLOCK) + at // BLOCK) * BYTES
    inside = (r < R) & (at < side.columns)
    tl.store(start + 4 + at % BLOCK // LENGTH, inner.to(tl.uint8), mask=inside)
    start = start.to(tl.pointer_type(tl.int32))
    tl.store(start, outer, mask=inside & (at % BLOCK == 0))


@triton.jit
def _block_amax_of(
    lanes, LENGTH: tl.constexpr, WIDE: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Return the largest magnitude of LENGTH lanes, with all groups that share their block."""
    # Groups of the tile that have a block in common, from top to bottom and from left to right.
    DOWN: tl.constexpr = S.block // LENGTH if TRANSPOSED else S.block_rows
    ACROSS: tl.constexpr = S.block_rows if TRANSPOSED else S.block // LENGTH
    N: tl.constexpr = lanes[0].shape[0]
    block_amax = tl.abs(lanes[0])
    for i in tl.static_range(1, LENGTH):
        block_amax = larger(block_amax, tl.abs(lanes[i]))
    if DOWN * ACROSS > 1:
        shape: tl.constexpr = (N // (WIDE * DOWN), DOWN, WIDE // ACROSS, ACROSS)
        bits = tl.max(tl.max(tl.reshape(abs_bits(block_amax), shape), 3), 1)
        bits = tl.reshape(tl.broadcast_to(bits[:, None, :, None], shape), (N,))
        block_amax = bits.to(tl.float32, bitcast=True)
    return block_amax


@triton.jit
def _encoded(
    lanes, factor, scale, at, row_number, side, LENGTH: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Return LENGTH lanes as they are written: BF16 values, or words of codes (int32)."""
    E: tl.constexpr = S.element
    F: tl.constexpr = S.fold
    FOLD: tl.constexpr = S.fold is not None
    BITS: tl.constexpr = E.random_bits
    # Philox blocks of a group of 16, and elements of one.
    CALLS: tl.constexpr = BITS // 8
    DRAWN: tl.constexpr = 128 // BITS
    outs = ()
    if E.bits == 8 and not S.stochastic and not S.values:
        for i in tl.static_range(0, LENGTH, 4):
            outs = outs + (
                encode_four(lanes[i] * factor, lanes[i + 1] * factor, lanes[i + 2] * factor,
                            lanes[i + 3] * factor, scale, E, FOLD),
            )  # fmt: skip
    else:
        values = ()
        words = (at, at, at, at)
        for i in tl.static_range(LENGTH):
            x = lanes[i] * factor
            random = x
            if S.stochastic:
                if i % DRAWN == 0:
                    group_number = number(side.groups, (at + i) // 16, tl.cdiv(side.columns, 16))
                    counter = group_number * CALLS + i // DRAWN % CALLS
                    words = philox(side.key, counter, row_number)
                random = random_of(words, i % DRAWN, BITS)
            if S.values:
                outs = outs + (exact_bf16(rounded(x, random, E, S.stochastic) * scale, E),)
            elif FOLD:
                values = values + (rounded(x, random, E, S.stochastic) * scale,)
            else:
                outs = append_code(outs, encode(x, random, E, S.stochastic), i, E.bits)
        for i in tl.static_range(0, LENGTH if FOLD else 0, 4):
            outs = outs + (
                encode_four(values[i], values[i + 1], values[i + 2], values[i + 3], 1.0, F, False),
            )
    return outs


@triton.jit
def tile_side(
    x, block_amax, row0, col0, R, side, A: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, current_amax=None, first_program=0,
):  # fmt: skip
    """Quantize a tile [A, B] of x, or of its TRANSPOSED, that is transformed as one tensor.

    ``block_amax`` are the largest magnitudes of its 1xN blocks or rows, where they are known.
    ``current_amax`` is the tensor's amax for a scale per tensor that is delayed; ``first_program``
    writes the tensor scale.
    """
    H: tl.constexpr = S.transform
    if S.transform is not None:
        x = transform_tile(x, side.signs, A, B, H)
    if S.from_numbers or (S.block > 1 and block_amax is None):
        _lanes_of_tile(x, row0, col0, R, side, A, B, S, TRANSPOSED, EVEN, first_program)
    else:
        _whole_tile(x, block_amax, row0, col0, R, side, A, B, S, EVEN, current_amax, first_program)


@triton.jit
def _lanes_of_tile(
    x, row0, col0, R, side, A: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, first_program,
):  # fmt: skip
    """Quantize the blocks of a tile on lanes."""
    P: tl.constexpr = S.block_lanes
    N: tl.constexpr = A * B // P
    WIDE: tl.constexpr = A if TRANSPOSED else B // P
    groups = tl.reshape(x, (A, B // P, P))
    index = tl.arange(0, N)
    r, group = index // WIDE, index % WIDE
    if TRANSPOSED:
        groups = tl.permute(groups, (1, 0, 2))
        r, group = group, r
    lanes = apart(tl.reshape(groups, (N, P)), P)
    r += row0
    quantize_block(
        lanes, col0 + group * P, r, 0, number(side.rows, r, R), R,
        _largest_possible(side, r, R, S), side, first_program, WIDE, S, TRANSPOSED, EVEN,
    )  # fmt: skip


@triton.jit
def _whole_tile(
    x, block_amax, row0, col0, R, side, A: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    EVEN: tl.constexpr, current_amax, first_program,
):  # fmt: skip
    """Quantize a tile without blocks, or with blocks of known amaxes, as one tensor."""
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    columns = side.columns
    random = x
    if S.stochastic:
        row_numbers = number(side.rows, row0 + tl.arange(0, A), R)
        group_numbers = number(
            side.groups, col0 // 16 + tl.arange(0, B // 16), tl.cdiv(columns, 16)
        )
        BITS: tl.constexpr = E.random_bits
        random = random_tile(side.key, row_numbers, group_numbers, A, B, BITS)
    if S.row_scaled:
        r = row0 + tl.arange(0, A)
        if block_amax is None:
            block_amax = tl.load(side.amax + r, mask=r < R, other=0.0)
        stored, factor, scale, decode = SCALES(block_amax, block_amax, E, OPTIONS)
        x = x * factor[:, None]
        # The tiles of a row have the same; the first writes it.
        if col0 == 0:
            tl.store(side.scales + r, stored, mask=r < R)
    elif S.block > 1:
        amax = _largest_possible(side, row0, R, S)
        stored, factor, scale, decode = SCALES(block_amax, amax, E, OPTIONS)
        x = x * over_block(factor, A, B, S.block)
        if S.values:
            x = rounded(x, random, E, S.stochastic) * over_block(scale, A, B, S.block)
            store_tile(side.codes, exact_bf16(x, E), row0, col0, R, columns, EVEN)
        else:
            store_tile(side.scales, stored, row0, col0 // S.block, R, columns // S.block, EVEN)
    else:
        amax = tl.load(side.amax) if current_amax is None else delayed_amax(side.amax, current_amax)
        _, factor, scale, decode = SCALES(amax, amax, E, OPTIONS)
        x = x * factor
    if not S.values:
        code = encode(x, random, E, S.stochastic)
        if E.bits == 4:
            low, high = tl.split(tl.reshape(code, (A, B // 2, 2)))
            store_tile(side.codes, low | (high << 4), row0, col0 // 2, R, columns // 2, EVEN)
        else:
            store_tile(side.codes, code, row0, col0, R, columns, EVEN)
    if tl.program_id(0) == first_program:
        tl.store(side.tensor_scale, decode)
