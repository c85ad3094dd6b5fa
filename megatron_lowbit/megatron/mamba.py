"""What megatron-core's Mamba-2 mixer takes from mamba-ssm, also where that is not installed."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_lowbit.layers.ssd import causal_convolution, grouped_rms_norm, ssd

_HAVE_MAMBA_SSM: bool = mamba_mixer.HAVE_MAMBA_SSM  # as it was found: it is set below


class GatedNorm(torch.nn.Module):
    """RMSNorm of this rank's channels by groups, after an optional gate."""

    def __init__(
        self,
        channels: int,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: torch.device | int | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if norm_before_gate:
            raise NotImplementedError("the gate comes before the norm, as megatron-core asks")
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x, gate (..., channels) to the same shape, in x's dtype."""
        return grouped_rms_norm(x, self.weight, gate, self.group_size, self.eps)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight, split over the tensor-parallel group along its one axis."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def use_best_scan() -> str:
    """Give megatron-core's mixer the fastest scan that runs here, and say which."""
    if torch.cuda.is_available() and _HAVE_MAMBA_SSM:
        if mamba_mixer.causal_conv1d_fn is not None:
            return "mamba-ssm, convolution and scan fused"
        _install(partial(convolve_and_scan, scan=triton_scan))
        return "mamba-ssm's scan (causal-conv1d is not installed: torch's convolution)"
    why = "mamba-ssm is not installed" if torch.cuda.is_available() else "no GPU here"
    mamba_mixer.HAVE_MAMBA_SSM = True  # the mixer asks for nothing else of it
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    _install(partial(convolve_and_scan, scan=torch_scan))
    return f"torch ({why})"


def _install(function: Any) -> None:
    mamba_mixer.mamba_split_conv1d_scan_combined = function


def convolve_and_scan(
    zxbcdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    a: Tensor,
    D: Tensor,
    chunk_size: int,
    ngroups: int,
    *,
    scan: Any,
    headdim: int | None = None,
    **others: Any,
) -> Tensor:
    """mamba-ssm's ``mamba_split_conv1d_scan_combined`` by torch's convolution and a ``scan``.

    Args:
        zxbcdt: (batch, length, 2 * heads * head dim + 2 * groups * state dim + heads).
        conv_weight, conv_bias: (channels of x, B and C, width), (channels,).
        dt_bias, a: (heads,). D: (heads,) or (heads, head dim).

    Returns:
        (batch, length, heads * head dim) in zxbcdt's dtype, gated but not normalized.
    """
    if others.get("seq_idx") is not None:
        raise NotImplementedError("packed sequences need mamba-ssm and causal-conv1d")
    heads, inner = len(dt_bias), D.numel() if headdim is None else len(dt_bias) * headdim
    states = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * states, heads], dim=-1)
    xbc = causal_convolution(xbc, conv_weight, conv_bias)
    x, b, c = xbc.split([inner, ngroups * states, ngroups * states], dim=-1)
    x, z = (t.unflatten(-1, (heads, -1)) for t in (x, z))
    b, c = (t.unflatten(-1, (ngroups, -1)) for t in (b, c))
    return scan(x, dt, a, b, c, D, z, dt_bias, chunk_size).flatten(-2)


def torch_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, dt_bias: Tensor,
    chunk_size: int,
) -> Tensor:  # fmt: skip
    """torch's scan of x, z (batch, length, heads, head dim), dt before its bias and softplus."""
    y = ssd(x, F.softplus(dt.float() + dt_bias), a, b, c, d, chunk_size)
    return (y * F.silu(z.float())).to(x.dtype)


def triton_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, dt_bias: Tensor,
    chunk_size: int,
) -> Tensor:  # fmt: skip
    """mamba-ssm's of the same; ImportError where it is not installed."""
    if not _HAVE_MAMBA_SSM:
        raise ImportError("mamba-ssm is not installed")
    return mamba_mixer.mamba_chunk_scan_combined(
        x.contiguous(), dt.contiguous(), a, b.contiguous(), c.contiguous(), chunk_size,
        D=d, z=z.contiguous(), dt_bias=dt_bias, dt_softplus=True,
    )  # fmt: skip
