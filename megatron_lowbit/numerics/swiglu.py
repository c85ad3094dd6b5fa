"""SwiGLU, ``silu(gate) * up``, and its gradient, computed in FP32 and rounded once.

Source: "GLU Variants Improve Transformer" (arXiv 2002.05202), section 2; with the gate first, as
Megatron-LM's MLP has it.
"""

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """Return SwiGLU (R, C) of gate and up projection (R, 2 C), in their dtype."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def swiglu_grad(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient (R, 2 C) of SwiGLU's input, of its output's (R, C), in their dtype."""
    gate, up = gate_up.float().chunk(2, -1)
    dy, sigmoid = grad.float(), torch.sigmoid(gate)
    slope = 1 + gate * (1 - sigmoid)
    return torch.cat((dy * sigmoid * slope * up, dy * (gate * sigmoid)), -1).to(gate_up.dtype)
