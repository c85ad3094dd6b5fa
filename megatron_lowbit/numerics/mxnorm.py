"""MXNorm: a row's RMS estimated from its blocks' absmaxes, which quantization needs anyway.

Source: "MXNorm: Reusing MXFP block scales for efficient tensor normalisation" (arXiv 2603.13180),
sections 3.3, 3.4 and appendix K. For blocks of B elements with absmaxes m_1 .. m_K

    G = ((m_1**p + .. + m_K**p) / K) ** (1/p)
    RMS ~ G / c(p, B),    c(p, B) = E[max of B draws of |Z|, to the p] ** (1/p),  Z ~ N(0, 1)

exact in the limit of many blocks of Gaussian values. Normalized values are x * c / (G + eps): at
most c * K ** (1/p) in magnitude. All arithmetic is FP32; the powers are added up as a tree, halves
to halves, so that kernels can give the same bits (for p of 1 and 2).
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from megatron_lowbit.numerics.rmsnorm import divide, grouped_sum, square_root, tree_sum

_PANELS, _NODES, _END = 64, 32, 14.0
_TABLE_BITS = 8
_TABLE = 2**_TABLE_BITS
"""Intervals a binade of the inverse of appendix K's f."""
_REST_BITS = 23 - _TABLE_BITS


@dataclass(frozen=True)
class MXNorm:
    """An estimator of rows' RMS.

    Args:
        p: exponent of the mean of absmaxes, positive; 2 matches RMSNorm at 8B parameters, 1 fell
            behind there.
        eps: added to that mean.
        rounded: estimate from absmaxes rounded down to powers of two, as E8M0 scales would be
            (appendix K, unstable at 8B parameters); for study, and for p = 1 only.
    """

    p: float = 2.0
    eps: float = 1e-5
    rounded: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.p) and self.p > 0):
            raise ValueError(f"mxnorm p {self.p} is not a positive number")
        if self.rounded and self.p != 1:
            raise ValueError(f"mxnorm from rounded scales takes p 1, not {self.p}")

    def inverse_rms(self, x: Tensor, block: int) -> Tensor:
        """Return the factors, FP32 (R, 1), that normalize the rows of x (R, C).

        Raises:
            ValueError: C is not a multiple of ``block``.
        """
        if x.shape[-1] % block:
            raise ValueError(f"mxnorm takes whole blocks of {block}, not {x.shape[-1]} columns")
        absmax = x.float().unflatten(-1, (-1, block)).abs().amax(-1)
        if self.rounded:
            mean = _mean(_power_of_two_below(absmax))
            return (1.0 / (rms_of_rounded(mean, block) + self.eps))[..., None]
        mean = _mean(_power(absmax, self.p))
        factor = torch.full((), absmax_constant(self.p, block), device=x.device)
        return (factor / (_root(mean, self.p) + self.eps))[..., None]

    def normalize(self, x: Tensor, block: int) -> Tensor:
        """Normalize x (R, C), in FP32."""
        return x.float() * self.inverse_rms(x, block)


def norm_grad(grad: Tensor, x: Tensor, rho: Tensor) -> Tensor:
    """Return the gradient with respect to x (R, C), in x's dtype: RMSNorm's, appendix E.

    With g for ``grad``, (R, C), the gradient with respect to rho x, and rho FP32 (R, 1)::

        rho g - rho**3 (sum of g x / C) x

    The sum is in RMSNorm's order.
    """
    g, values = grad.float(), x.float()
    along = divide(grouped_sum(g * values), x.shape[-1])[..., None]
    return (rho * g - rho * rho * rho * along * values).to(x.dtype)


def _mean(values: Tensor) -> Tensor:
    return divide(tree_sum(values), values.shape[-1])


def _power(x: Tensor, p: float) -> Tensor:
    return x if p == 1 else x * x if p == 2 else x**p


def _root(x: Tensor, p: float) -> Tensor:
    return x if p == 1 else square_root(x) if p == 2 else x ** (1 / p)


def _power_of_two_below(x: Tensor) -> Tensor:
    """Round normal positive numbers down to powers of two; 0 stays 0."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


@cache
def absmax_constant(p: float, block: int) -> float:
    """Compute c(p, B) by Gauss-Legendre integration of the absmax's distribution, to 1e-10.

    E[M**p] is the integral of p z**(p-1) P(M > z); with z = t**n, n >= 8/p, it is smooth at 0.
    """
    n = math.ceil(8 / p)
    t, weights = _quadrature(_END ** (1 / n))
    beyond = -torch.expm1(block * torch.log(torch.special.erf(t**n / math.sqrt(2))))
    moment = (weights * p * n * t ** (n * p - 1) * beyond).sum()
    return math.pow(float(moment), 1 / p)


def _quadrature(end: float) -> tuple[Tensor, Tensor]:
    """Return nodes and weights, FP64, of integrals from 0 to ``end``."""
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(_NODES))
    width = end / _PANELS
    starts = width * torch.arange(_PANELS, dtype=torch.float64)
    abscissae = starts[:, None] + width / 2 * (nodes + 1)
    return abscissae.flatten(), (width / 2 * weights).repeat(_PANELS)


def mean_rounded(sigma: float, block: int) -> float:
    """Compute f(sigma) of appendix K: the mean of a block's absmax rounded to a power of two."""
    powers = torch.arange(-64, 64, dtype=torch.float64)
    below = torch.special.erf(2.0**powers / (sigma * math.sqrt(2))) ** block
    # P(2**j <= M < 2**(j+1)); the paper's K.1 has the last difference the other way round.
    return float((2.0 ** powers[:-1] * below.diff()).sum())


@cache
def rounded_table(block: int, device: torch.device) -> Tensor:
    """Return the sigmas, FP32 (257,) on a device, whose means are 1 + i / 256 for i from 0 to 256.

    The points are equally far apart, where the paper's are powers of 2 ** (1 / A): an FP32 mean's
    leading bits are then its place in the table, on every device.
    """
    sigmas = []
    for i in range(_TABLE + 1):
        target, low, high = 1 + i / _TABLE, 1e-3, 4.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_rounded(middle, block) < target else (low, middle)
        sigmas.append((low + high) / 2)
    return torch.tensor(sigmas, dtype=torch.float32, device=device)


def rms_of_rounded(mean: Tensor, block: int) -> Tensor:
    """Return the RMS, FP32, of Gaussian rows by the means of their rounded absmaxes.

    f(2 sigma) = 2 f(sigma), so that one binade of the inverse, linear between its points, is all.
    """
    table = rounded_table(block, mean.device)
    bits = mean.view(torch.int32)
    index = (bits >> _REST_BITS) & (_TABLE - 1)
    fraction = (bits & (2**_REST_BITS - 1)).float() * 2.0**-_REST_BITS
    low, high = table[index], table[index + 1]
    rms: Tensor = _power_of_two_below(mean) * (low + (high - low) * fraction)
    return rms
