"""Block random Hadamard transform.

Source: "Pretraining Large Language Models with NVFP4", appendix C; "Training LLMs with MXFP4"
(arXiv 2502.20586), algorithm 2. Blocks of ``size`` elements along the last axis become
``y = x * diag(s) * H / sqrt(size)`` with Sylvester's H (entries +-1) and signs s. The transform is
orthonormal, so applied with the same signs to both operands along a GEMM's contraction axis it
leaves the exact product unchanged.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.numerics.randomness import Draw, derive_key, words

FIXED_SIGNS_16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The sign vector that Transformer Engine fixes for its 16-point transform."""

MAX_SIZE = 256


@dataclass(frozen=True)
class Hadamard:
    """One transform for both operands of a GEMM.

    Args:
        size: points of the transform, a power of two from 2 to 256.
        signs: ``fixed`` (one pinned vector; at 16 points Transformer Engine's), an integer (one
            vector drawn from that seed, for all transforms), ``fresh`` (drawn again for each GEMM
            from a key) or ``none``.
        output: dtype that the transformed values are rounded to before quantization: ``bf16`` as
            in NVFP4 training, ``fp32`` as in MXFP4 training.
    """

    size: int = 16
    signs: Literal["fixed", "fresh", "none"] | int = "fixed"
    output: Literal["bf16", "fp32"] = "bf16"

    def __post_init__(self) -> None:
        if not (2 <= self.size <= MAX_SIZE and self.size & (self.size - 1) == 0):
            raise ValueError(f"hadamard size {self.size} is not a power of two from 2 to 256")
        if self.signs not in ("fixed", "fresh", "none") and type(self.signs) is not int:
            raise ValueError(
                f"hadamard signs {self.signs!r} is not one of fixed, fresh, none or an integer seed"
            )
        if self.output not in ("bf16", "fp32"):
            raise ValueError(f"hadamard output {self.output!r} is not one of bf16, fp32")

    def sign_vector(self, key: int = 0) -> tuple[int, ...]:
        """Return the signs, one per element; ``key`` (64 bits) draws them where they are fresh."""
        if self.signs == "none":
            return (1,) * self.size
        if self.signs == "fresh":
            return _drawn_signs(key, self.size)
        if self.signs == "fixed":
            return FIXED_SIGNS_16 if self.size == 16 else _drawn_signs(0, self.size)
        return _drawn_signs(derive_key(self.signs), self.size)


@lru_cache(maxsize=4096)
def _drawn_signs(key: int, size: int) -> tuple[int, ...]:
    """Draw signs by Philox: words of row ``size``, minus where the highest bit is set."""
    key_words = Draw(key).key_words(torch.device("cpu"))
    drawn = words(key_words, torch.tensor([size]), torch.arange(-(-size // 4)))
    return tuple(1 - 2 * (word >> 31) for word in drawn[0, :size].tolist())


def hadamard_transform(x: Tensor, hadamard: Hadamard, sign_key: int | Tensor = 0) -> Tensor:
    """Transform blocks along the last axis.

    The sum of a block runs in FP32 as a butterfly over distances 1, 2, 4, ... of the points: the
    order is part of the definition, so that engines agree bit for bit.

    Args:
        x: (..., K), FP32 or BF16; a ragged last block is padded with zeros.
        hadamard: the transform.
        sign_key: key of fresh signs.

    Returns:
        FP32, (..., K rounded up to a whole block), values rounded to ``hadamard.output``.
    """
    size = hadamard.size
    x = F.pad(x.to(torch.float32), (0, -x.shape[-1] % size))
    lanes = [
        lane if sign > 0 else 0.0 - lane  # zeros of padding stay positive
        for lane, sign in zip(
            x.unflatten(-1, (x.shape[-1] // size, size)).unbind(-1),
            hadamard.sign_vector(int(sign_key) % 2**64),
            strict=True,
        )
    ]
    distance = 1
    while distance < size:
        for i in range(size):
            if not i & distance:
                low, high = lanes[i], lanes[i + distance]
                lanes[i], lanes[i + distance] = low + high, low - high
        distance *= 2
    y = torch.stack(lanes, dim=-1).flatten(-2) * (1.0 / math.sqrt(size))
    return y.to(torch.bfloat16).to(torch.float32) if hadamard.output == "bf16" else y
