"""FP8 with a scale per row: a scalar derivation, torchao's scales, and the order's effect."""

import numpy as np
import pytest
import torch
from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

from megatron_lowbit.numerics import FORMATS, Draw, Quantizer, Rounding, quantize
from tests.numerics.conftest import bytes_of, nearest_codes

ALL = ["fp8-row-e4m3", "fp8-row-e5m2"]
F32 = np.float32
FLT_MAX = np.finfo(F32).max


def rows_of_every_magnitude(seed: int, columns: int = 173) -> torch.Tensor:
    """Return a row for each binade of FP32, subnormal ones too, and two rows of zeros."""
    rng = np.random.default_rng(seed)
    exponent = np.arange(-149, 128)[:, None] - rng.integers(0, 20, (277, columns))
    x = rng.choice([-1, 1], exponent.shape) * np.ldexp(rng.uniform(1, 2, exponent.shape), exponent)
    x[rng.random(x.shape) < 0.05] = 0
    x = np.clip(x, -FLT_MAX, FLT_MAX).astype(F32)
    x[[5, 200]] = 0
    return torch.from_numpy(x)


def scalar_scales(amax: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and their inverses, by numpy's FP32 division; a reciprocal saturates."""
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        scales = (amax / F32(largest)).astype(F32)
        inverse = np.minimum(F32(1) / scales, FLT_MAX)
    return scales, np.where(scales == 0, F32(0), inverse)


@pytest.mark.parametrize("format", ALL)
def test_against_scalars(format):
    """Rounded by table from float64, which holds each FP32 product; scales by numpy's FP32."""
    element = FORMATS[format].element
    for seed in range(3):
        x = rows_of_every_magnitude(seed)
        q = quantize(x, format)
        scales, inverse = scalar_scales(np.abs(x.numpy()).max(1, keepdims=True), element.max)
        assert q.scales.shape == (277, 1) and q.scales.dtype == torch.float32
        assert q.codes.dtype == element.dtype and q.tensor_scale == 1
        np.testing.assert_array_equal(q.scales.numpy(), scales)
        with np.errstate(over="ignore", under="ignore"):
            codes = nearest_codes((x.numpy() * inverse).astype(np.float64), element)
            values = q.codes.float().numpy() * scales
        np.testing.assert_array_equal(bytes_of(q.codes), codes)
        np.testing.assert_array_equal(q.dequantize().numpy(), values)
        assert (scales == 0).sum() >= 2 and (inverse == FLT_MAX).any()  # both corners were met


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_torchaos(format, dtype):
    """torchao's inference quantizer divides amax by max, too, but x by the scale.

    The source multiplies x by the scale's inverse: a few codes next to a midpoint differ.
    """
    x = rows_of_every_magnitude(7, 1024)[40:-24].to(dtype)
    x = x[x.abs().amax(1) > 0]
    q = quantize(x, format)
    dtype_of_codes = FORMATS[format].element.dtype
    theirs = _choose_scale_float8(x.float(), [1, x.shape[1]], dtype_of_codes)
    assert len(x) > 200 and torch.equal(q.scales, theirs)
    codes = _quantize_affine_float8(x.float(), theirs, dtype_of_codes).to(dtype_of_codes)
    assert (bytes_of(q.codes) != bytes_of(codes)).mean() < 1e-3


def test_a_weight_has_a_scale_for_each_row_of_either_gemm():
    """Output features in fprop, input features in dgrad: each made from that axis alone."""
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    fprop, dgrad = (quantize(weight, "fp8-row-e4m3", axis=axis) for axis in (1, 0))
    for q, axis in ((fprop, 1), (dgrad, 0)):
        amax = weight.abs().amax(axis).numpy()
        np.testing.assert_array_equal(q.scales[:, 0].numpy(), amax / F32(448))


def test_stochastic_rounding_is_unbiased():
    """The mean over draws, within four standard errors, of a row whose scale is 1."""
    x = torch.linspace(-448, 448, 331)[None].repeat(4000, 1)
    values = Quantizer(FORMATS["fp8-row-e4m3"], Rounding.STOCHASTIC)(x, draw=Draw(5)).dequantize()
    values = values.double()
    error = (values.mean(0) - x[0].double()).abs()
    assert (error <= 4 * values.std(0) / 4000**0.5 + 1e-12).all()
    assert values.std(0).max() > 1


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_no_elements(shape):
    q = quantize(torch.zeros(shape), "fp8-row-e4m3")
    assert q.dequantize().shape == shape and (q.scales == 0).all()
