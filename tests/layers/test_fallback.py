"""Products that are not finite, computed again in high precision."""

from copy import copy

import pytest
import torch
import torch.nn.functional as F

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.numerics.gemms import GEMM_ROLES
from megatron_lowbit.recipes import load_recipe

ENGINE = ReferenceEngine("tests")
GEMMS = tuple(GEMM_ROLES)


def leaves(dtype=torch.float32, device="cpu", m=40, n=136, k=160):
    generator = torch.Generator().manual_seed(5)
    x, weight, dy, bias = (
        torch.randn(s, generator=generator).to(dtype).to(device)
        for s in ((m, k), (n, k), (m, n), (n,))
    )
    return x.requires_grad_(), weight.requires_grad_(), bias, dy


def run(x, weight, bias, dy, precision, engine=ENGINE, counts=None):
    y = lowbit_linear(x, weight, LinearContext(precision, engine, 3, fallbacks=counts), bias=bias)
    return (y.detach(), *torch.autograd.grad(y, [x, weight], dy))


def breaking(engine, broken, bad):
    """Return an engine one of whose three products has a value that is not finite."""
    products, made = iter(GEMMS), copy(engine)

    def gemm(*operands):
        y = engine.gemm(*operands)
        if next(products) == broken:
            y[1, 2] = bad
        return y

    made.gemm = gemm
    return made


@pytest.mark.parametrize(
    ("broken", "bad"), [*zip(GEMMS, (torch.nan, torch.inf, -torch.inf), strict=True)]
)
@pytest.mark.parametrize("name", ["fp8-tile", "nvfp4", "fp8-tensorwise"])
def test_the_broken_product_is_high_precisions(name, broken, bad):
    """And no other: those are the recipe's, to the bit."""
    x, weight, bias, dy = leaves()
    plain, guarded = (next_precision(name, settings) for settings in ([], ["fallback=bf16"]))
    expected = dict(zip(GEMMS, run(x, weight, bias, dy, plain), strict=True))
    y = F.linear(x, weight, bias)
    exact = dict(zip(GEMMS, (y, *torch.autograd.grad(y, [x, weight], dy)), strict=True))
    counts = torch.zeros(3, dtype=torch.int64)
    results = run(x, weight, bias, dy, guarded, breaking(ENGINE, broken, bad), counts)
    for gemm, result in zip(GEMMS, results, strict=True):
        assert torch.equal(result, exact[gemm] if gemm == broken else expected[gemm])
    assert counts.tolist() == [gemm == broken for gemm in GEMMS]


def next_precision(name, settings):
    """Return the config of a recipe that quantizes."""
    recipe = load_recipe(name, settings)
    return next(c for key, c in recipe.configs.items() if key != "bf16")


def test_what_is_not_finite_in_high_precision_either_stays():
    """An infinite input is no fault of the product."""
    x, weight, bias, dy = leaves()
    with torch.no_grad():
        x[0, 0] = torch.inf
    counts = torch.zeros(3, dtype=torch.int64)
    precision = next_precision("fp8-tile", ["fprop.fallback=bf16"])
    y, *_ = run(x, weight, bias, dy, precision, counts=counts)
    assert torch.equal(y[0].isnan(), F.linear(x, weight, bias)[0].isnan())
    assert y[1:].isfinite().all() and counts.tolist() == [1, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("broken", GEMMS)
def test_on_a_gpu(broken):
    """The broken product is within BF16's rounding of float64's, the others are the recipe's."""
    x, weight, bias, dy = leaves(torch.bfloat16, "cuda", 512, 256, 384)
    engine = select_engine(torch.device("cuda"))
    plain, guarded = (next_precision("fp8-tile", s) for s in ([], ["fallback=bf16"]))
    expected = dict(zip(GEMMS, run(x, weight, bias, dy, plain, engine), strict=True))
    left, right, add = (t.detach().double().requires_grad_() for t in (x, weight, bias))
    y = F.linear(left, right, add)
    exact = dict(zip(GEMMS, (y, *torch.autograd.grad(y, [left, right], dy.double())), strict=True))
    counts = torch.zeros(3, dtype=torch.int64, device="cuda")
    results = run(x, weight, bias, dy, guarded, breaking(engine, broken, torch.nan), counts)
    for gemm, result in zip(GEMMS, results, strict=True):
        if gemm == broken:
            torch.testing.assert_close(result.double(), exact[gemm], rtol=2**-8, atol=1e-3)
        else:
            assert torch.equal(result, expected[gemm])
    assert counts.tolist() == [gemm == broken for gemm in GEMMS]
