"""Random bits of a run, from its seed down to the word of an element: pure functions throughout.

    microbatch_key(seed, iteration, microbatch, ...)     one forward and backward pass
    layer_key(microbatch_key, layer)                     one linear layer in it
    operand_key(layer_key, gemm, role)                   one operand of one of its GEMMs
    sign_key(layer_key, gemm)                            fresh signs of a GEMM's transform
    Draw(operand_key, rows, groups)                      rows and columns of the whole operand
    uniform(key, rows, groups, bits)                     a number in (0, 1) for each element

A resumed, resharded, recomputed or captured run draws the same bits. The words are from
Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Counters are places in the whole, unsharded operand, block axis last: the words at counters
``(0, row, 0, 0)``, ``(1, row, 0, 0)``, ... are one string of bits, lowest bits first, of which
element ``(row, col)`` has the ``col``-th 8 or 16. A tensor-parallel shard therefore draws the bits
that the same elements draw on one device. A second number for each element comes from the counters
``(0, row, 1, 0)``, ``(1, row, 1, 0)``, ...
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_lowbit.numerics.gemms import OPERANDS, Gemm, Role

Key = int | Tensor
"""Key of a layer, 64 bits; or its table in device memory, int64, as :func:`key_table` lists it.

A CUDA graph reads the table, which is filled again for each microbatch that it replays."""
GROUP = 16
"""Neighbours along the block axis that draw together: one Philox block for 8 bits each."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def derive_key(*parts: int | str) -> int:
    """Derive a 64-bit key from integers (modulo 2**64) and names, by BLAKE2b of them in order."""
    packed = [
        _packed(part) if isinstance(part, str) else (part % 2**64).to_bytes(8, "little")
        for part in parts
    ]
    digest = hashlib.blake2b(b"".join(packed), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@lru_cache(maxsize=1024)
def _packed(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def microbatch_key(seed: int, iteration: int, microbatch: int, context: int = 0) -> int:
    """Return the key (63 bits) of a microbatch.

    Args:
        seed: of the run.
        iteration: finished iterations.
        microbatch: number in the global batch, whichever rank has it.
        context: context-parallel rank, which holds other tokens of the same sequences.
    """
    # torch.initial_seed(), which carries it, is read as a signed number by some callers.
    return derive_key(seed, iteration, microbatch, context) & (2**63 - 1)


def layer_key(microbatch: int, layer: int) -> int:
    """Return a layer's key in a microbatch; ``layer`` is :func:`derive_key` of its path."""
    return derive_key(microbatch, layer)


def operand_key(key: Key, gemm: Gemm, role: Role) -> Key:
    """Return the key of an operand's draws, from its layer's key."""
    if isinstance(key, Tensor):
        return key[OPERANDS.index((gemm, role))]
    return derive_key(key, list(Gemm).index(gemm), list(Role).index(role))


def sign_key(key: Key, gemm: Gemm) -> Key:
    """Return the key of fresh signs, which both operands of a GEMM share."""
    if isinstance(key, Tensor):
        return key[len(OPERANDS) + list(Gemm).index(gemm)]
    return derive_key(key, "signs", str(gemm))


def key_table(key: int) -> list[int]:
    """Return the keys of all operands, then of all GEMMs' signs, as signed numbers of 64 bits."""
    keys = [operand_key(key, *operand) for operand in OPERANDS]
    keys += [sign_key(key, gemm) for gemm in Gemm]
    return [int(number) - ((int(number) >> 63) << 64) for number in keys]


@dataclass(frozen=True)
class Draw:
    """Random bits of an operand of R rows and K columns (block axis).

    ``key`` is a 64-bit integer, or has its bits in the memory of a device (int64 scalar), where a
    CUDA graph finds another one in each microbatch. ``rows`` (int64, R) and ``groups`` (int64,
    ceil(K/16)) are the global row numbers and the global column numbers divided by 16; None counts
    from zero, for an operand that is not sharded.
    """

    key: int | Tensor
    rows: Tensor | None = None
    groups: Tensor | None = None

    def key_words(self, device: torch.device) -> Tensor:
        """Return the key as int64 data (low word, high word): engines need not recompile for it."""
        if isinstance(self.key, Tensor):
            return torch.stack([self.key & _MASK, (self.key >> 32) & _MASK])
        return torch.tensor([self.key & _MASK, self.key >> 32], device=device)

    def counters(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return row and group numbers of an operand of the given size, as int64 tensors.

        Raises:
            ValueError: the global numbers given are not as many as the operand has.
        """
        group_count = -(-columns // GROUP)
        by_row, by_group = (
            torch.arange(count, device=device) if given is None else given.to(device)
            for given, count in ((self.rows, rows), (self.groups, group_count))
        )
        if by_row.numel() != rows or by_group.numel() != group_count:
            raise ValueError(
                f"Draw names {by_row.numel()} rows and {by_group.numel()} groups for an "
                f"operand of {rows} x {columns}"
            )
        return by_row, by_group


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Run ten rounds of Philox4x32 on int64 tensors of 32-bit words, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product wraps as int64; its 64 bits are still the bits of the unsigned product.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _MASK) ^ c1 ^ k0,
            right & _MASK,
            ((left >> 32) & _MASK) ^ c3 ^ k1,
            left & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words(key_words: Tensor, rows: Tensor, blocks: Tensor, draw: int = 0) -> Tensor:
    """Draw 32-bit words as int64, (R, 4 * len(blocks)): counters (block, row, draw, 0)."""
    zero = torch.zeros_like(blocks[None, :] + rows[:, None])
    counter = (zero + blocks[None, :], zero + rows[:, None], zero + draw, zero)
    return torch.stack(philox4x32(counter, (key_words[0], key_words[1])), dim=-1).flatten(-2)


def uniform(key_words: Tensor, rows: Tensor, groups: Tensor, bits: int, draw: int = 0) -> Tensor:
    """Draw uniform FP32 numbers from 8 or 16 bits each, shape (R, 16 * len(groups)).

    ``draw`` counts the numbers that one element takes, from 0.

    A number is ``1 - (r + 1/2) / 2**bits`` of its bits r: a fraction is larger where the sum of
    fraction and bits exceeds 1. Numbers lie symmetric in (0, 1), so that rounding is unbiased over
    fractions; a single fraction is rounded up with the nearest chance in steps of 2**-bits.
    """
    per_group = GROUP * bits // 128
    blocks = (groups[:, None] * per_group + torch.arange(per_group, device=groups.device)).flatten()
    shifts = torch.arange(0, 32, bits, device=groups.device)
    drawn: Tensor = (words(key_words, rows, blocks, draw).unsqueeze(-1) >> shifts) & (2**bits - 1)
    return 1.0 - (drawn.flatten(-2).to(torch.float32) + 0.5) * 2.0**-bits
