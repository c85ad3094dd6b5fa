"""torch's norms with the options of Transformer Engine's, for machines without CUDA."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm whose gain is 1 + weight (``--apply-layernorm-1p``); weights begin at 0."""

    def reset_parameters(self) -> None:
        """Let gain and bias be 1 and 0."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., hidden size)."""
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gain is 1 + weight (``--apply-layernorm-1p``); weights begin at 0."""

    def reset_parameters(self) -> None:
        """Let the gain be 1."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., hidden size)."""
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


_NORMS = {
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("LayerNorm", True): ZeroCenteredLayerNorm,
    ("RMSNorm", False): torch.nn.RMSNorm,
    ("RMSNorm", True): ZeroCenteredRMSNorm,
}


def build(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
    """Build a norm, in the place of the constructors of Megatron-LM's norms.

    Under sequence parallelism the parameters see this rank's tokens only; their mark makes
    Megatron-LM sum their gradients over the tensor-parallel group.
    """
    norm = _NORMS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
