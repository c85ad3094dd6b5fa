"""The BF16 GEMM with a factor in device memory, against FP64."""

import pytest
import torch

from megatron_lowbit.kernels import cublas
from megatron_lowbit.kernels.cublas import scaled_matmul

LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "a slice": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "repeated rows": lambda x: x[:1].expand(x.shape),
    "neither": lambda x: torch.stack([x, x], 2)[..., 0],
}


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("shape", [(128, 256, 512), (33, 7, 65), (1, 1, 1)], ids=str)
def test_products(shape, left, right, out_dtype):
    m, n, k = shape
    draws = torch.Generator("cuda").manual_seed(1)
    new = {"generator": draws, "device": "cuda", "dtype": torch.bfloat16}
    a = LAYOUTS[left](torch.randn(m, k, **new))
    b = LAYOUTS[right](torch.randn(n, k, **new))
    factor = torch.tensor(0.37, device="cuda")
    y = scaled_matmul(a, b, factor, out_dtype)
    exact = a.double() @ b.double().t() * factor.double()
    # FP32 sums of magnitudes, then one rounding to the output's dtype.
    most = a.double().abs() @ b.double().abs().t() * factor.double()
    bound = 1e-6 * most + exact.abs() * torch.finfo(out_dtype).eps / 2
    assert y.shape == (m, n) and y.dtype == out_dtype and y.is_contiguous()
    assert ((y.double() - exact).abs() <= bound * 1.01).all()


@pytest.mark.gpu
@pytest.mark.parametrize("left", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_and_a_sum_to_add_to(left):
    """Few products, so that the sums of FP8 tensor cores are exact to FP32's last bits."""
    draws = torch.Generator("cuda").manual_seed(2)
    a = torch.randn(64, 32, generator=draws, device="cuda").to(left)
    b = torch.randn(48, 32, generator=draws, device="cuda").to(torch.float8_e4m3fn)
    out = torch.randn(64, 48, generator=draws, device="cuda")
    factor = torch.tensor(0.37, device="cuda")
    exact = out.double() + a.double() @ b.double().t() * factor.double()
    most = out.abs().double() + a.double().abs() @ b.double().abs().t() * factor.double()
    assert scaled_matmul(a, b, factor, torch.float32, out) is out
    # Hopper cuts each step of 32 products off at 2**-13 of the largest.
    assert ((out.double() - exact).abs() <= 2.0**-13 * most).all()


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [None, 0.37], ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_adding_equals_writing_and_a_sum(kind, factor):
    """Kernels that add in memory round the product to FP32 first, and others do not."""
    draws = torch.Generator("cuda").manual_seed(3)
    a, b = (torch.randn(2048, 1024, generator=draws, device="cuda").to(kind) for _ in range(2))
    factor = None if factor is None else torch.tensor(factor, device="cuda")
    out = torch.full((2048, 2048), torch.nan, device="cuda")
    scaled_matmul(a, b, factor, torch.float32, out, False)
    product = scaled_matmul(a, b, factor, torch.float32)
    assert torch.equal(out, product)
    before = torch.randn(2048, 2048, generator=draws, device="cuda")
    twice = scaled_matmul(a, b, factor, torch.float32, before.clone())
    eps = torch.finfo(torch.float32).eps
    assert ((twice - (before + product)).abs() <= eps * (before.abs() + product.abs())).all()


@pytest.mark.gpu
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_fastest_algorithm_has_the_bits_of_the_first(kind, adds):
    """Algorithms are timed after some calls of a kind, with the caller's own matrices."""
    draws = torch.Generator("cuda").manual_seed(4)
    a, b = (torch.randn(768, 1280, generator=draws, device="cuda").to(kind) for _ in range(2))
    before = torch.randn(768, 768, generator=draws, device="cuda")
    seen = []
    for _ in range(2 * cublas._OFTEN):
        seen.append(scaled_matmul(a, b, None, torch.float32, before.clone(), adds))
    assert all(torch.equal(y, seen[0]) for y in seen)
    matrices = cublas._matrix(b), cublas._matrix(a, transposed=True), cublas._matrix(before)
    plan = cublas._plan(*matrices, a.device, False)
    assert len(plan.algorithms) == 1


@pytest.mark.gpu
def test_calls_of_one_size_have_their_own_factors():
    """They share a description, in which FP8's factor is; a product without one follows."""
    a = torch.ones(32, 32, device="cuda").to(torch.float8_e4m3fn)
    half, three = (torch.tensor(factor, device="cuda") for factor in (0.5, 3.0))
    factors = [half, three, (half, three), None]
    seen = [scaled_matmul(a, a, factor, torch.float32)[0, 0].item() for factor in factors]
    assert seen == [16.0, 96.0, 48.0, 32.0]


@pytest.mark.gpu
def test_no_elements():
    factor = torch.ones((), device="cuda")
    new = {"device": "cuda", "dtype": torch.bfloat16}
    for m, n, k in ((0, 4, 4), (4, 0, 4), (4, 4, 0)):
        y = scaled_matmul(torch.ones(m, k, **new), torch.ones(n, k, **new), factor, torch.float32)
        assert y.shape == (m, n) and not y.any()
