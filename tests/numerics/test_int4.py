"""INT4 in groups against compressed-tensors' own arithmetic, by scalars, and in its corners."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as theirs
from compressed_tensors.quantization.quant_args import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams

from megatron_lowbit.numerics import FORMATS, Draw, Quantizer, Rounding, quantize
from tests.numerics.conftest import codes_of

GROUPS = (32, 128)


def rows_of_many_magnitudes(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers, ties of every code, a row of zeros and one with a group of zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 384, generator=generator)
    x *= torch.exp2(torch.randint(-60, 60, (200, 1), generator=generator).float())
    x[7] = (torch.arange(384) % 16 - 8 + 0.5).clamp(-7.5, 7.5)  # scale 1
    x[8] = 0
    x[9, :128] = 0
    return x.to(dtype)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_compressed_tensors(group, dtype):
    """Its scales rounded to BF16, its codes of FP32 values by these scales, its packing."""
    x = rows_of_many_magnitudes(dtype)
    scheme = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=group, symmetric=True
    )
    grouped = x.float().unflatten(1, (-1, group))
    low, high = (getattr(grouped, name)(-1) for name in ("amin", "amax"))
    scales, zero_points = calculate_qparams(low.bfloat16(), high.bfloat16(), scheme)
    if dtype is torch.float32:  # a range in BF16 would be another one
        scales, _ = calculate_qparams(low, high, scheme)
        scales = torch.where(grouped.abs().amax(-1) == 0, 2.0**-7, scales).bfloat16()
    codes = theirs(x.float(), scales.float(), zero_points.float(), scheme, dtype=torch.int8)
    q = quantize(x, f"int4-1x{group}")
    assert q.scales.dtype == scales.dtype == torch.bfloat16 and torch.equal(q.scales, scales)
    assert torch.equal(q.codes.view(torch.int32), pack_to_int32(codes, 4))
    values = dequantize(codes, scales.float(), zero_points.float(), scheme)
    assert torch.equal(q.dequantize(), values)
    assert set(codes.unique().tolist()) == set(range(-8, 8))


@pytest.mark.parametrize("group", GROUPS)
def test_against_exact_fractions(group):
    """Quotients by fractions: the scale is amax / 7.5 rounded to 8 bits, ties go to even codes."""
    x = rows_of_many_magnitudes()[:12, :group]
    q = quantize(x, f"int4-1x{group}")
    codes = codes_of(q)
    for row, values in enumerate(x.tolist()):
        amax = max(map(abs, values))
        scale = torch.tensor(np.float32(amax) / np.float32(7.5)).bfloat16().item() or 2.0**-7
        assert q.scales[row].item() == scale
        steps = [min(7, max(-8, round(Fraction(value) / Fraction(scale)))) for value in values]
        assert (codes[row] - 8.0).tolist() == steps


def test_scales_at_the_ends_of_fp32():
    """A scale that underflows is the epsilon, and one of the largest numbers is finite."""
    x = torch.zeros(3, 32)
    x[0, 0], x[1, 0], x[2, 0] = 2.0**-149, 2.0**-126, torch.finfo(torch.float32).max
    q = quantize(x, "int4-1x32")
    assert q.scales[0].item() == 2.0**-7 and q.dequantize()[0].eq(0).all()
    assert q.dequantize()[1:, 0].isfinite().all() and q.dequantize()[1:, 0].ne(0).all()


def test_stochastic_rounding_is_unbiased():
    """The mean over draws is within 4 standard errors; values on the grid never move."""
    quantizer = Quantizer(FORMATS["int4-1x32"], Rounding.STOCHASTIC)
    x = torch.linspace(-7.0, 7.0, 32)
    x[0] = -7.5  # scale 1
    keys, rows = 40, 100
    alike = x.expand(rows, 32)
    seen = torch.cat([quantizer(alike, draw=Draw(key)).dequantize() for key in range(keys)])
    inner = x[1:]
    fraction = inner - inner.floor()
    error = (fraction * (1 - fraction) / len(seen)).sqrt()
    assert ((seen.mean(0)[1:] - inner).abs() <= 4 * error + 2e-6).all()
    assert torch.equal(seen[:, -1], torch.full((keys * rows,), 7.0))
