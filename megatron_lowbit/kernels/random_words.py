"""Device functions: the random words of stochastic rounding, as ``numerics/randomness.py`` says."""

import triton
import triton.language as tl


@triton.jit
def philox(key, quad, row):
    """Run Philox4x32-10 on counters (quad, row, 0, 0) of one shape; return four uint32 tensors.

    Products as 64-bit ones: that is one instruction for both halves.
    """
    key = key.to(tl.int64)  # a small one comes as int32
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c0 = quad.to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = tl.zeros_like(c0)
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
def word_tile(key, rows, quads, A: tl.constexpr, B: tl.constexpr):
    """Draw words [A, B] for row numbers ``rows`` [A] and quad numbers ``quads`` [B // 4]."""
    shape: tl.constexpr = (A, B // 4)
    w0, w1, w2, w3 = philox(
        key, tl.broadcast_to(quads[None, :], shape), tl.broadcast_to(rows[:, None], shape)
    )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (A, B))


@triton.jit
def number(pointer, local, count):
    """Return global numbers (int32) of rows or quads, of ``count``; their own without."""
    if pointer is None:
        return local
    else:
        return tl.load(pointer + local, mask=local < count, other=0).to(tl.int32)
