"""torch's Adam with the interface of Transformer Engine's, for machines without CUDA.

Megatron-LM supports torch's own Adam in training, but cannot load the checkpoints of a distributed
optimizer that is one: a fresh torch Adam has no ``step`` for it to describe. Transformer Engine's
counts steps in its parameter groups.
"""

from collections.abc import Callable
from typing import Any

import torch


class GroupStepAdam(torch.optim.Adam):
    """Adam that keeps the number of steps in its parameter groups, as fused ones do.

    Args:
        params: parameters or parameter groups.
        adam_w_mode: decouple weight decay, as AdamW does.
        capturable: ignored; it is about CUDA graphs.
        **settings: as torch's.
    """

    def __init__(
        self, params: Any, adam_w_mode: bool = True, capturable: bool = False, **settings: Any
    ) -> None:
        super().__init__(params, decoupled_weight_decay=adam_w_mode, **settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a loaded state; torch's Adam would look for a ``step`` of each parameter."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Take a step; torch's arithmetic and bits."""
        if closure is not None:
            raise ValueError("closure: not supported, as in Transformer Engine's Adam")
        stepping = []
        for group in self.param_groups:
            # Taken from a checkpoint it may be a tensor.
            done = int(group.get("step", 0))
            group["step"] = done + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] = torch.tensor(float(done))
                stepping.append(state)
        super().step()
        for state in stepping:
            del state["step"]
