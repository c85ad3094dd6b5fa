"""Mamba-2's state space model in torch: a short convolution, then a scan over the sequence.

"Transformers are SSMs" (arXiv 2405.21060), section 6: within a chunk as masked attention, from
chunk to chunk by a state. Everything is computed in FP32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def ssd(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk_size: int = 128
) -> Tensor:
    """Compute y_t = C_t h_t + D x_t of states h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t.

    Args:
        x: Inputs (batch, length, heads, head dim).
        dt: Positive steps (batch, length, heads).
        a: Negative rates (heads,).
        b, c: (batch, length, groups, state dim); heads split evenly over the groups.
        d: Skips (heads,) or (heads, head dim).
        chunk_size: Tokens that go together; of memory, a chunk takes its square for each head.

    Returns:
        (batch, length, heads, head dim) in FP32.
    """
    length, heads = x.shape[1:3]
    x, dt, a, b, c, d = (t.float() for t in (x, dt, a, b, c, d))
    per_group = heads // b.shape[2]
    skipped = (d if d.dim() == 2 else d[:, None]) * x
    # A step of 0 neither decays nor adds: what fills the last chunk up changes nothing.
    missing = -length % chunk_size
    x, b, c = (_chunks(t, missing, chunk_size) for t in (x, b, c))
    dt = _chunks(dt, missing, chunk_size)
    b, c = (t.repeat_interleave(per_group, dim=3) for t in (b, c))
    x = x * dt[..., None]
    # (batch, chunk, head, token): the logarithm of each token's decay.
    log = (dt * a).permute(0, 1, 3, 2)
    decays = _segment_sums(log).exp()
    scores = torch.einsum("zkthn,zkshn->zkhts", c, b) * decays
    y = torch.einsum("zkhts,zkshp->zkthp", scores, x)
    # States that each chunk adds by its end.
    to_end = decays[..., -1, :].permute(0, 1, 3, 2)
    added = torch.einsum("zkshn,zkshp->zkhpn", b * to_end[..., None], x)
    # States at the start of chunk k: what chunk j < k added, decayed over the chunks between.
    sums = _segment_sums(F.pad(log.sum(-1).permute(0, 2, 1), (1, 0)))
    states = torch.einsum("zhkj,zjhpn->zkhpn", sums[..., :-1, 1:].exp(), added)
    from_start = log.cumsum(-1).exp().permute(0, 1, 3, 2)
    y = y + torch.einsum("zkthn,zkhpn->zkthp", c * from_start[..., None], states)
    return y.flatten(1, 2)[:, :length] + skipped


def _chunks(x: Tensor, missing: int, size: int) -> Tensor:
    """Split (batch, length, ...) into (batch, chunk, size, ...), with zeros at the end."""
    padding = (0, 0) * (x.dim() - 2) + (0, missing)
    chunks: Tensor = F.pad(x, padding).unflatten(1, (-1, size))
    return chunks


def _segment_sums(x: Tensor) -> Tensor:
    """Sum x from after s to t, -inf for s > t: (..., n) to (..., t, s).

    Not differences of one sum from the start: these cancel, most of all in backward.
    """
    n = x.shape[-1]
    past = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    terms = x[..., :, None].expand(*x.shape, n).masked_fill(~past.tril(-1), 0.0)
    return terms.cumsum(-2).masked_fill(~past, -torch.inf)


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel of x (batch, length, channels) with its own past, then apply SiLU.

    ``weight`` is (channels, width), whose last entry meets the token itself; ``bias`` (channels,).
    """
    channels, width = weight.shape
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    y = F.conv1d(padded, weight[:, None], bias, groups=channels)
    return F.silu(y).transpose(1, 2)


def grouped_rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor | None, group_size: int, eps: float
) -> Tensor:
    """Normalize each group of channels by RMSNorm, of x or of x times SiLU of the gate.

    x, gate (..., channels), weight (channels,). Computed in FP32, returned in x's dtype.
    """
    dtype, x = x.dtype, x.float()
    if gate is not None:
        x = x * F.silu(gate.float())
    groups: Tensor = x.unflatten(-1, (-1, group_size))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return (groups.flatten(-2) * weight.float()).to(dtype)
