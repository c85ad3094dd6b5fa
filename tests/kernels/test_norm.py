"""A norm and the cast in one kernel, and a norm's backward pass: the bits of the reference."""

from itertools import product

import pytest
import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.kernels.norm import norm_grad, normalize_quantize
from megatron_lowbit.kernels.operands import ExactBF16
from megatron_lowbit.kernels.rms_norm import rms_norm
from megatron_lowbit.kernels.routes import Form, takes_norm
from megatron_lowbit.numerics import FORMATS, Quantizer, Request, Rounding, mxnorm
from megatron_lowbit.numerics.block_formats.mx import MX
from megatron_lowbit.numerics.formats import E2M1, E4M3
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Rows of whole programs and of one that is not; of fewer where the interpreter runs them in turn.
RAGGED = 37 if DEVICE == "cuda" else 9
NAMES = ["mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp4", "nvfp4", "nvfp4-ue5m3", "quartet2",
         "fp8-1x128-e4m3", "tetrajet2"]  # fmt: skip


def values(rows, columns, dtype=torch.bfloat16):
    draws = torch.Generator().manual_seed(rows)
    x, wide = (torch.randn(rows, columns, generator=draws) for _ in range(2))
    return (x * wide.exp()).to(dtype).to(DEVICE)


NORMS = {
    "MXNorm": MXNorm(),
    "p 1": MXNorm(p=1),
    "post-round": MXNorm(p=1, rounded=True),
    "RMSNorm": RMSNorm(),
}


BOTH_NORMS = pytest.mark.parametrize("norm", [MXNorm(), RMSNorm()], ids=["MXNorm", "RMSNorm"])


def check(x, format, norm, form=Form.CODES):
    quantizer = Quantizer(FORMATS[format] if isinstance(format, str) else format)
    block = quantizer.format.block
    normalized = norm.normalize(x, block)
    # What a layer behind RMSNorm gets is in the model's dtype.
    expected = quantizer(normalized.to(x.dtype) if isinstance(norm, RMSNorm) else normalized)
    seen, rho = normalize_quantize(x, norm, Request(quantizer), form)
    assert torch.equal(rho, norm.inverse_rms(x, block))
    if form is Form.BF16:
        assert isinstance(seen, ExactBF16)
        scale = 1.0 if seen.tensor_scale is None else seen.tensor_scale
        assert torch.equal(seen.values.float() * scale, expected.dequantize())
        return
    assert torch.equal(seen.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(seen.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert torch.equal(seen.tensor_scale, expected.tensor_scale)


# In make test, both norms for each format, and MXNorm's other means for one of each amax's kind.
QUICK = {*product(NAMES, ("MXNorm", "RMSNorm")), *product(("mxfp8-e4m3", "nvfp4"), NORMS)}


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
        for case in product(NAMES, NORMS)
    ],
)
def test_the_references_bits(name, norm):
    check(values(RAGGED, 512), name, NORMS[norm])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@BOTH_NORMS
def test_other_dtypes(norm, dtype):
    check(values(RAGGED, 512, dtype), "mxfp8-e4m3", norm)


@BOTH_NORMS
@pytest.mark.parametrize("block", [64, 16])
def test_other_tiles(block, norm):
    for scale_format in ("fp32", "pow2"):
        options = {"block": block, "scale_format": scale_format}
        check(values(RAGGED, 384), FORMATS["fp8-1x128-e4m3"].with_options(**options), norm)


@BOTH_NORMS
@pytest.mark.parametrize(
    "columns", [128, 384, *(pytest.param(c, marks=pytest.mark.slow) for c in (640, 896))]
)
def test_other_widths_and_rows(columns, norm):
    for name in ("mxfp8-e4m3", "nvfp4"):
        check(values(RAGGED, columns), name, norm)


@pytest.mark.parametrize("name", ["fp8-tensor-e4m3", "fp8-row-e4m3", "mxfp8-e4m3"])
@pytest.mark.parametrize("columns", [1, 5, 8, 20, 31, 32, 33])
def test_rows_that_the_kernel_takes(name, columns):
    """It takes none that are too narrow for its groups of neighbors."""
    x, request = values(RAGGED, columns), Request(Quantizer(FORMATS[name]))
    fits = columns >= 32 and columns % request.quantizer.format.block == 0
    assert takes_norm(x, RMSNorm(), request) == fits
    if fits:
        check(x, name, RMSNorm())


@pytest.mark.parametrize("element", [E4M3, E2M1], ids=str)
@pytest.mark.parametrize("block", [16, 64])
def test_other_blocks(element, block):
    check(values(RAGGED, 320), MX("study", element, 1, block=block), MXNorm())


@pytest.mark.parametrize("columns", [128, 320, pytest.param(896, marks=pytest.mark.slow)])
def test_a_scale_a_row(columns):
    x, gain = values(RAGGED, columns), values(2, columns)[0]
    x[3] = 0
    check(x, "fp8-row-e4m3", RMSNorm())
    quantizer = Quantizer(FORMATS["fp8-row-e5m2"])
    expected = quantizer((RMSNorm().normalize(x) * gain.float()).to(x.dtype))
    seen, _ = normalize_quantize(x, RMSNorm(), Request(quantizer), Form.CODES, gain)
    assert torch.equal(seen.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(seen.scales, expected.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [32, 96, 320, 1024])
def test_rms_norm_and_the_amax_of_its_rows(columns, dtype):
    x, gain = values(RAGGED, columns, dtype), values(2, columns)[0]
    y, rho, amax = rms_norm(x, gain, 1e-5)
    expected = (RMSNorm().normalize(x) * gain.float()).to(dtype)
    assert y.dtype is dtype and torch.equal(y, expected)
    assert torch.equal(rho, RMSNorm().inverse_rms(x)[:, 0])
    assert amax == expected.float().abs().max()
    x[1, 3] = torch.nan
    y, _, amax = rms_norm(x, gain, 1e-5)
    assert amax.isnan() and y.isnan().sum() == columns


def test_rms_norm_of_strides_and_of_what_it_does_not_take():
    x, gain = values(256, RAGGED), values(2, 256)[0]
    assert torch.equal(rms_norm(x.t(), gain, 1e-5)[0], rms_norm(x.t().contiguous(), gain, 1e-5)[0])
    for other in (x[:0].t(), x[:16].t(), x.t().half()):
        assert rms_norm(other, gain[: other.shape[1]], 1e-5) is None


def test_rounded_absmaxes_of_every_magnitude():
    """Subnormal absmaxes and means count as 0; means of a binade's end are in the table."""
    x = values(32, 256, torch.float32)
    x *= 2.0 ** torch.linspace(-150, 120, 32, device=DEVICE)[:, None]
    x[0], x[1], x[2] = 0, 1, 1.9999999
    check(x, "mxfp8-e4m3", MXNorm(p=1, rounded=True))


def test_fp32_and_strides():
    check(values(32, 256, torch.float32), "mxfp8-e4m3", MXNorm())
    check(values(64, 256)[::2], "nvfp4", MXNorm())
    check(values(256, 64).t(), "mxfp4", MXNorm())


@pytest.mark.parametrize("name", ["mxfp8-e4m3", "nvfp4"])
def test_as_numbers(name):
    check(values(32, 256), name, MXNorm(), form=Form.BF16)


def test_rows_of_zeros_and_what_is_no_number():
    x = values(16, 256)
    x[3] = 0
    check(x, "mxfp8-e4m3", MXNorm())
    x[5, 7] = torch.nan
    quantizer = Quantizer(FORMATS["mxfp8-e4m3"])
    seen, rho = normalize_quantize(x, MXNorm(), Request(quantizer), Form.CODES)
    assert rho.isnan().flatten().tolist() == [row == 5 for row in range(16)]
    assert seen.dequantize().isnan().all(1).tolist() == [row == 5 for row in range(16)]


def test_what_one_kernel_does_not_take_goes_the_long_way():
    x, nearest = values(32, 256), Quantizer(FORMATS["mxfp8-e4m3"])
    assert takes_norm(x, MXNorm(), Request(nearest))
    for norm, quantizer in (
        (MXNorm(p=3), nearest),
        (MXNorm(), Quantizer(FORMATS["mxfp8-e4m3"], Rounding.STOCHASTIC)),
        (MXNorm(), Quantizer(FORMATS["fp8-128x128-e4m3"])),
        (RMSNorm(), Quantizer(FORMATS["nvfp4"].with_options(row_scaled=True))),
    ):
        assert not takes_norm(x, norm, Request(quantizer))
    assert not takes_norm(x[:, :200], MXNorm(), Request(nearest))
    case = MXNorm(p=3), Request(nearest, needs_codes=True)
    made, rho = FusedEngine((9, 0)).normalize(x, *case)
    # On the same device: powers have other last bits on a GPU.
    expected, other = ReferenceEngine("tests").normalize(x, *case)
    assert torch.equal(made.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(rho, other)


def grad_input_and_factors(rows, columns, dtype=torch.bfloat16):
    draws = torch.Generator().manual_seed(columns)
    x, grad = (torch.randn(rows, columns, generator=draws).to(dtype).to(DEVICE) for _ in range(2))
    return grad, x, MXNorm().inverse_rms(x, 32)


def test_the_gradient_of_rms_norm():
    """With the RMS itself for the estimate it is what autograd finds in FP64."""
    grad, x, _ = grad_input_and_factors(8, 320, torch.float32)
    exact = x.double().requires_grad_()
    rho = exact.square().mean(-1, keepdim=True).rsqrt()
    (exact * rho).backward(grad.double())
    seen = mxnorm.norm_grad(grad, x, rho.detach().float())
    torch.testing.assert_close(seen.double(), exact.grad, rtol=0, atol=2e-6)


@pytest.mark.parametrize("columns", [32, 64, 320, 384, 1024, 4096, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_references_gradient(columns, dtype):
    for rows in (3, 16):
        grad, x, rho = grad_input_and_factors(rows, columns, dtype)
        expected = mxnorm.norm_grad(grad, x, rho)
        assert expected.dtype is dtype
        assert torch.equal(norm_grad(grad, x, rho), expected)


def test_strides_dtypes_and_no_rows():
    grad, x, rho = grad_input_and_factors(32, 64)
    assert torch.equal(norm_grad(grad.float(), x, rho), mxnorm.norm_grad(grad.float(), x, rho))
    for order in (lambda t: t[::2], lambda t: t.t().contiguous().t()):
        other = order(grad), order(x), order(rho)
        assert torch.equal(norm_grad(*other), mxnorm.norm_grad(*(t.contiguous() for t in other)))
    assert norm_grad(grad[:0], x[:0], rho[:0]).shape == (0, 64)


@pytest.mark.gpu
def test_a_gpus_bits_are_a_cpus():
    grad, x, rho = grad_input_and_factors(512, 4096)
    expected = mxnorm.norm_grad(grad.cpu(), x.cpu(), rho.cpu())
    assert torch.equal(norm_grad(grad, x, rho).cpu(), expected)
