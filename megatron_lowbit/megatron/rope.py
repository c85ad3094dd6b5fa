"""Rotary position embedding that reads and writes a query or a key once each way."""

import torch
from torch import Tensor

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.models.common.embeddings import rope_utils

from megatron_lowbit.megatron.one_kernel import one_kernel


def use_fused_rope() -> None:
    """Let megatron-core's ``apply_rope_fusion`` work where Transformer Engine is absent.

    Its configuration refuses the option, and its attention fails, while this name is None.
    """
    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = fused_rope


def fused_rope(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys by their positions' angles, computing in FP32.

    Args:
        t: (s, b, heads, d), of any floating-point type and with any strides.
        freqs: angles (s, 1, 1, r) in FP32, r even and at most d, their second half equal to the
            first. The last d - r channels stay as they are.
        interleaved: must be False: channel i turns with channel i + r / 2.

    Returns (s, b, heads, d) of t's type. Raises ValueError for interleaved channels.
    """
    if interleaved:
        raise ValueError("rotary_interleaved: fused rope turns channels of two halves only")
    return _Rope.apply(t, freqs)


class _Rope(torch.autograd.Function):
    """A rotation: its gradient is turned back, and no query or key is kept."""

    @staticmethod
    def forward(ctx, t: Tensor, freqs: Tensor) -> Tensor:
        cos, sin, back = _turns(freqs)
        ctx.turn_back = cos, back
        return _rotate(t, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _rotate(grad, *ctx.turn_back), None


def _turns(freqs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, and sines to turn forth and back: with the tensor, which all layers are given."""
    if not hasattr(freqs, "turns"):
        cos, sin = freqs.cos(), freqs.sin()
        sin[..., : sin.size(-1) // 2].neg_()
        freqs.turns = cos, sin, -sin
    return freqs.turns


@one_kernel
def _rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``t * cos + (t with its halves swapped) * sin``, over the first ``cos.size(-1)`` channels."""
    width = cos.size(-1)
    halves = (2, width // 2)
    x = t[..., :width].float().unflatten(-1, halves)
    # Swapped by flip, an index; slices and torch.cat could become kernels of their own.
    turned = x * cos.unflatten(-1, halves) + x.flip(-2) * sin.unflatten(-1, halves)
    turned = turned.flatten(-2).to(t.dtype)
    return turned if width == t.size(-1) else torch.cat((turned, t[..., width:]), -1)
