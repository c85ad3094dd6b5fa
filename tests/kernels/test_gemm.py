"""GEMM routes on a CPU: float64 stand-ins take the place of cuBLAS, with its rules on arguments.

They check what only a GPU would refuse or misread: alignment, order of scales, alpha and beta.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.kernels import gemm, routes
from megatron_lowbit.kernels.operands import ExactBF16
from megatron_lowbit.numerics import FORMATS, Quantizer, folding, format_by_name
from megatron_lowbit.numerics.block_formats.fp8 import TILE

ALIGNMENT = 16


def scaled_matmul(a, b, factor, out_dtype, out=None, beta=True) -> Tensor:
    """Compute what ``kernels/cublas.py`` does, in float64, and check its documented demands."""
    if a.dtype.itemsize == 1:
        assert not any(size % ALIGNMENT for size in (*a.shape, *b.shape))
        assert a.stride(1) == b.stride(1) == 1
    assert a.shape[1] == b.shape[1] and (out is None or out.dtype is out_dtype)
    factors = factor if isinstance(factor, tuple) else (factor,)
    product = a.double() @ b.double().t()
    for scale in factors:
        product *= 1.0 if scale is None else scale.double()
    if out is None:
        return product.to(out_dtype)
    return out.copy_(product + out.double() * float(beta))


def torch_scaled_mm(a, b, scale_a, scale_b, out_dtype, out=None) -> Tensor:
    """Compute what ``torch._scaled_mm`` does with scales per tensor or per tile of 128."""
    assert a.stride(1) == 1 and b.stride(0) == 1
    assert not any(size % ALIGNMENT for size in (*a.shape, *b.shape))
    if scale_a.numel() == scale_b.numel() == 1 and not scale_a.dim():
        product = a.double() @ b.double() * scale_a.double() * scale_b.double()
    else:
        # Rows of 1x128 tiles first, those of 128x128 tiles along K, as cuBLAS reads them.
        for scale, codes in ((scale_a, a), (scale_b.t(), b.t())):
            square = scale.shape[0] != codes.shape[0]
            assert scale.shape[1] == codes.shape[1] / TILE
            assert scale.stride(1 if square else 0) == 1
            assert not square or scale.shape[1] % 4 == 0
        product = _scaled(a, scale_a) @ _scaled(b.t(), scale_b.t()).t()
    return product.to(out_dtype) if out is None else out.copy_(product)


def _scaled(codes: Tensor, scales: Tensor) -> Tensor:
    rows = scales if scales.shape[0] == codes.shape[0] else scales.repeat_interleave(TILE, 0)
    by_element = rows[: codes.shape[0]].repeat_interleave(TILE, 1)
    return codes.double() * by_element.double()


def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype) -> Tensor:
    """Compute what ``torch.nn.functional.scaled_mm`` does with a scale per row."""
    assert not any(size % ALIGNMENT for size in (*a.shape, *b.shape))
    assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
    return (a.double() @ b.double() * scale_a.double() * scale_b.double()).to(output_dtype)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(gemm, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(torch, "_scaled_mm", torch_scaled_mm)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch, "mm", _mm)


def _mm(a, b, out_dtype=None):
    return (a.double() @ b.double()).to(out_dtype or a.dtype)


def operand(name: str, rows: int, columns: int, seed: int):
    """Quantize a matrix whose tensor scale is far from 1 and differs between operands."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x = x * 10.0**seed
    if name == "bf16":
        return x.bfloat16()
    format = format_by_name(name.removesuffix(" rows"))
    format = format.with_options(row_scaled=True) if name.endswith("rows") else format
    x[::2] *= 3  # scales of rows differ by more than a rounding
    quantized = Quantizer(format)(x)
    if format.name != "nvfp4":
        return quantized
    scale = quantized.tensor_scale
    return ExactBF16((quantized.dequantize() / scale).bfloat16(), scale)


ROUTES = {
    "tiles": (routes.TILES, "fp8-1x128-e4m3", "fp8-128x128-e4m3"),
    "tiles, both 1x128": (routes.TILES, "fp8-1x128-e4m3", "fp8-1x128-e5m2"),
    "tensors": (routes.TENSORS, "fp8-tensor-e4m3", "fp8-tensor-e5m2"),
    "rows": (routes.ROWS, "fp8-row-e4m3", "fp8-row-e4m3"),
    "exact": (routes.EXACT, "nvfp4", "nvfp4"),
    "exact and BF16": (routes.EXACT, "nvfp4", "bf16"),
    "exact, rows": (routes.EXACT, "nvfp4 rows", "nvfp4"),
    "exact, rows of both": (routes.EXACT, "nvfp4 rows", "nvfp4 rows"),
    "BF16 and exact, rows": (routes.EXACT, "bf16", "nvfp4 rows"),
}
SHAPES = [(48, 32, 256), (37, 21, 200)]
"""Tokens, outputs and inputs: aligned, and not."""


def exact_values(operand) -> Tensor:
    return operand.double() if isinstance(operand, Tensor) else operand.dequantize().double()


def case(route: str, shape: tuple[int, int, int]) -> tuple:
    function, left, right = ROUTES[route]
    m, n, k = shape
    lhs, rhs = operand(left, m, k, 1), operand(right, n, k, 2)
    return function, lhs, rhs, exact_values(lhs) @ exact_values(rhs).t()


def check(y: Tensor, expected: Tensor) -> None:
    """Compare with the exact product, up to the rounding of one result in FP32."""
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=expected.abs().max() * 1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", ROUTES)
def test_product(route, shape):
    *operands, expected = case(route, shape)
    check(gemm.multiply(*operands, None, torch.float32), expected)
    bias = torch.full((shape[1],), 7.0)
    check(gemm.multiply(*operands, bias, torch.float32), expected + 7.0)


@pytest.mark.parametrize("beta", [False, True], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", ROUTES)
def test_product_into_a_sum(route, shape, beta):
    *operands, expected = case(route, shape)
    start = 3.0 * expected.abs().max().item()
    out = torch.full(expected.shape, start)
    assert gemm.multiply(*operands, None, torch.float32, (out, beta)) is out
    check(out, expected + (start if beta else 0.0))
    rows = torch.full((len(out), 2 * out.shape[1]), start)[:, : out.shape[1]]  # not contiguous
    check(gemm.multiply(*operands, None, torch.float32, (rows, beta)), out.double())


def test_folded_product(monkeypatch):
    """Each operand is folded for its own side, next to the format of the other."""
    monkeypatch.setattr(gemm, "fold", lambda operand, target, _: folding.fold(operand, target))
    lhs, rhs = (Quantizer(FORMATS[name])(torch.randn(32, 64)) for name in ("mxfp8-e4m3", "mxfp4"))
    left = folding.fold(lhs, folding.folded_format(lhs.format, True, rhs.format))
    right = folding.fold(rhs, folding.folded_format(rhs.format, False, lhs.format))
    check(
        gemm.multiply(routes.FOLDED, lhs, rhs, None, torch.float32),
        exact_values(left) @ exact_values(right).t(),
    )
