"""Device functions: the random words of stochastic rounding, as ``numerics/randomness.py`` says."""

import triton
import triton.language as tl


@triton.jit
def key_of(key):
    """Return a key (int64), which comes as a number or, for CUDA graphs, in device memory."""
    if key.dtype.is_ptr():
        return tl.load(key)
    else:
        return key.to(tl.int64)  # a small one comes as int32


@triton.jit
def philox(key, quad, row, DRAW: tl.constexpr = 0):
    """Run Philox4x32-10 on counters (quad, row, DRAW, 0) of one shape; return four uint32 tensors.

    ``key`` is int64. Products as 64-bit ones: that is one instruction for both halves.
    """
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c0 = quad.to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = tl.zeros_like(c0) + DRAW
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        left = c0.to(tl.uint64) * 0xD2511F53
        right = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = right.to(tl.uint32)
        c3 = left.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def random_tile(key, rows, groups, A: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr):
    """Draw BITS bits per element, int32 [A, B], by numbers of rows [A] and of groups [B // 16]."""
    BLOCKS: tl.constexpr = B * BITS // 128
    PER_GROUP: tl.constexpr = BITS // 8
    PER_WORD: tl.constexpr = 32 // BITS
    blocks = groups[:, None] * PER_GROUP + tl.arange(0, PER_GROUP)[None, :]
    blocks = tl.broadcast_to(tl.reshape(blocks, (BLOCKS,))[None, :], (A, BLOCKS))
    w0, w1, w2, w3 = philox(key, blocks, tl.broadcast_to(rows[:, None], (A, BLOCKS)))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (A, 4 * BLOCKS, 1))
    shifts = tl.arange(0, PER_WORD).to(tl.uint32) * BITS
    drawn = (words >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(drawn.to(tl.int32), (A, B))


@triton.jit
def random_of(words, i: tl.constexpr, BITS: tl.constexpr):
    """Return the i-th BITS bits of the words of a Philox block, as int32."""
    PER_WORD: tl.constexpr = 32 // BITS
    word = words[i // PER_WORD].to(tl.int32, bitcast=True)
    return (word >> (i % PER_WORD * BITS)) & ((1 << BITS) - 1)


@triton.jit
def number(pointer, local, count):
    """Return global numbers (int32) of rows or groups, of ``count``; their own without."""
    if pointer is None:
        return local
    else:
        return tl.load(pointer + local, mask=local < count, other=0).to(tl.int32)
