"""Blocks of ggml, llama.cpp's library of tensors, from the codes and scales of exported weights.

Source: ggml-common.h (``block_mxfp4``, ``block_nvfp4``, ``block_q4_0``). Every block starts with
its scales, then has its codes, two in a byte: element j in the low nibble, j + n/2 in the high one,
of n elements. Codes and scales keep their values; they are only moved.

    MXFP4  32 elements: an E8M0 byte, 16 bytes of E2M1 codes
    NVFP4  64 elements: four E4M3 bytes, a scale for each 16; four times 8 bytes of E2M1 codes
    Q4_0   32 elements: an FP16 scale, 16 bytes of integers plus 8
"""

import torch
from torch import Tensor

from megatron_lowbit.errors import require
from megatron_lowbit.numerics.formats import E8M0_NAN, unpack_nibbles

_E4M3_NAN = 0x7F


def mxfp4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Pack codes (R, K/2) and E8M0 scales (R, K/32), uint8, into bytes (R, K/32 * 17)."""
    _check(scales, E8M0_NAN, "E8M0")
    return torch.cat([scales.unsqueeze(-1), _in_halves(codes, 32)], dim=-1).flatten(1)


def nvfp4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Pack codes (R, K/2), uint8, and E4M3 scales (R, K/16) into bytes (R, K/64 * 36)."""
    scales = scales.view(torch.uint8)
    _check(scales, _E4M3_NAN, "E4M3")
    columns = 2 * codes.shape[1]
    require(
        columns % 64 == 0, f"{columns} columns are not whole blocks of 64, as NVFP4 has in ggml"
    )
    quarters = _in_halves(codes, 16).unflatten(1, (-1, 4)).flatten(2)
    return torch.cat([scales.unflatten(1, (-1, 4)), quarters], dim=-1).flatten(1)


def q4_0_blocks(words: Tensor, scales: Tensor) -> Tensor:
    """Pack int32 words of eight codes (R, K/8) and scales (R, K/G) into bytes (R, K/32 * 18).

    Scales of groups of G, a multiple of 32, are repeated. Raises UserError for a scale that is no
    FP16 number; of BF16 scales these are those from 65536 and most below 2**-17.
    """
    codes = words.view(torch.uint8)
    repeats, rest = divmod(2 * codes.shape[1], 32 * scales.shape[1])
    require(rest == 0, "groups of integers are not whole blocks of 32, as Q4_0 has in ggml")
    halves = scales.to(torch.float16)
    exact = scales.is_meta or bool((halves.to(scales.dtype) == scales).all())
    require(exact, "a scale is no FP16 number, which Q4_0 has in ggml")
    repeated = halves.repeat_interleave(repeats, dim=1).unsqueeze(-1).view(torch.uint8)
    return torch.cat([repeated, _in_halves(codes, 32)], dim=-1).flatten(1)


def _in_halves(codes: Tensor, block: int) -> Tensor:
    """Pack pairs of neighbours (R, K/2) anew as pairs half a block apart (R, K/block, block/2)."""
    low, high = unpack_nibbles(codes).unflatten(1, (-1, block)).chunk(2, dim=-1)
    return low | (high << 4)


def _check(scales: Tensor, first_refused: int, name: str) -> None:
    is_good = scales.is_meta or bool((scales < first_refused).all())
    require(is_good, f"a scale is NaN or negative, which {name} scales in ggml are not")
