"""Torch's Adam and norms with the interfaces of Transformer Engine's, for machines without CUDA."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class GroupStepAdam(torch.optim.Adam):
    """Adam that counts steps in its parameter groups, like Transformer Engine's.

    Megatron-LM trains with torch's own Adam, but cannot load checkpoints of a distributed optimizer
    with it, because a new torch Adam has no ``step``.

    Args:
        params: parameters or parameter groups.
        adam_w_mode: decouple weight decay, as AdamW does.
        capturable: ignored; only CUDA graphs need it.
        **settings: further arguments of torch's Adam.
    """

    def __init__(
        self, params: Any, adam_w_mode: bool = True, capturable: bool = False, **settings: Any
    ) -> None:
        super().__init__(params, decoupled_weight_decay=adam_w_mode, **settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set a loaded state; torch's Adam would look for each parameter's ``step``."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters by torch's Adam."""
        if closure is not None:
            raise ValueError("closure: not supported, as in Transformer Engine's Adam")
        stepping = []
        for group in self.param_groups:
            # A checkpoint may hold it as a tensor.
            steps = int(group.get("step", 0))
            group["step"] = steps + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] = torch.tensor(float(steps))
                stepping.append(state)
        super().step()
        for state in stepping:
            del state["step"]


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm with gain 1 + weight (``--apply-layernorm-1p``)."""

    def reset_parameters(self) -> None:
        """Initialize the gain to 1 and the bias to 0."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., hidden size)."""
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with gain 1 + weight (``--apply-layernorm-1p``)."""

    def reset_parameters(self) -> None:
        """Initialize the gain to 1."""
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


def build_norm(
    _: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any
) -> torch.nn.Module:
    """Build a norm, as the constructor of Megatron-LM's norms.

    The attribute ``sequence_parallel`` of the parameters makes Megatron-LM sum their gradients over
    the tensor-parallel group.
    """
    norm = _NORMS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
