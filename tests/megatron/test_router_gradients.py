"""Gradients of a router's weight in BF16 and under recipes, against float64.

A recipe never quantizes the router. Its gradient is made of the experts' outputs, so that it has
the errors of two GEMMs: fprop of fc1, and dgrad of fc2. ``pytest -rP`` shows the figures.
"""

from collections.abc import Callable

import pytest
import torch

from megatron_lowbit.megatron.layers.state import layer_states
from megatron_lowbit.megatron.run.steps import set_microbatch_key
from megatron_lowbit.numerics import Draw, Rounding
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.recipes import load_recipe
from tests.megatron.test_expert_counts import GPT, NVFP4, moe_layer, on_a_cpu

# isort: split
from megatron.core.transformer.moe.moe_layer import MoELayer

TOKENS, WIDTH, EXPERTS = 256, 128, 4
SEEDS = range(8)
MODEL = (
    f"{GPT} --hidden-size {WIDTH} --moe-ffn-hidden-size {WIDTH} --num-experts {EXPERTS} "
    "--moe-aux-loss-coeff 0 --moe-router-dtype fp32"
)
RECIPES = {name: f"--precision-recipe {name}" for name in ("bf16", "fp8-tile", "mxfp8")}
RECIPES["nvfp4"] = NVFP4
QUANTIZED = [name for name in RECIPES if name != "bf16"]
FC1, FC2 = "experts.linear_fc1.{}.weight", "experts.linear_fc2.{}.weight"

Quantize = Callable[[Gemm, Role, torch.Tensor], torch.Tensor]
"""Function of a GEMM, a role and an operand, float64: the values that the GEMM multiplies."""


def draw(layer: MoELayer, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a layer's weights; return its input and a gradient of its output, (T, 1, H) BF16."""
    draws = torch.Generator().manual_seed(seed)
    layer.bfloat16()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draws) / WIDTH**0.5)
    x, dy = (torch.randn(TOKENS, 1, WIDTH, generator=draws).bfloat16() for _ in range(2))
    return x, dy


def gradient(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor, key: int = 0) -> torch.Tensor:
    """Return the gradient of the router's weight, (E, H) float64, of a micro batch."""
    for state in layer_states([layer]):
        state.forget_weight()
    layer.zero_grad()
    set_microbatch_key(1, key, 3)
    layer(x.clone().requires_grad_())[0].backward(dy)
    return layer.router.weight.grad.double()


def in_float64(
    layer: MoELayer, x: torch.Tensor, dy: torch.Tensor, quantize: Quantize = lambda *given: given[2]
) -> torch.Tensor:
    """Return the gradient of the router's weight, (E, H), written here in float64."""
    weights = {name: weight.detach().double() for name, weight in layer.named_parameters()}
    x, dy = x.double().flatten(0, 1), dy.double().flatten(0, 1)
    router = weights["router.weight"].requires_grad_()
    logits, chosen = (x @ router.t()).topk(2)
    probs, of_probs = logits.softmax(1), torch.zeros_like(logits)
    for expert in range(EXPERTS):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        fc1 = quantize(Gemm.FPROP, Role.WEIGHT, weights[FC1.format(expert)])
        gate, up = (quantize(Gemm.FPROP, Role.INPUT, x[token]) @ fc1.t()).chunk(2, 1)
        fc2 = quantize(Gemm.DGRAD, Role.WEIGHT, weights[FC2.format(expert)].t())
        grad = quantize(Gemm.DGRAD, Role.GRAD, dy[token]) @ fc2.t()
        of_probs[token, place] = (torch.nn.functional.silu(gate) * up * grad).sum(1)
    return torch.autograd.grad(probs, router, of_probs)[0]


def quantizer_of(recipe: str, *overrides: str, unbiased: bool = False) -> Quantize:
    """Return the quantization of a recipe's operands.

    ``unbiased``: leave those that are rounded stochastically as they are.
    """
    precisions = load_recipe(recipe, overrides).precisions()
    (precision,) = (precision for precision in precisions if precision.quantized)

    def quantize(gemm: Gemm, role: Role, x: torch.Tensor) -> torch.Tensor:
        quantizer = precision.quantizer(gemm, role)
        if unbiased and quantizer.rounding is Rounding.STOCHASTIC:
            return x
        return quantizer(x.float(), draw=Draw(7)).dequantize().double()

    return quantize


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the expected norm."""
    return float((found - expected).norm() / expected.norm())


def gemm_error(recipe: str, gemm: Gemm, roles: tuple[Role, Role]) -> float:
    """Return a GEMM's relative error with normal operands, (T, H) and (H, H)."""
    draws, quantize = torch.Generator().manual_seed(9), quantizer_of(recipe)
    left, right = (
        torch.randn(rows, WIDTH, generator=draws).bfloat16().double() for rows in (TOKENS, WIDTH)
    )
    found = quantize(gemm, roles[0], left) @ quantize(gemm, roles[1], right).t()
    return distance(found, left @ right.t())


def errors_and_cosines(recipe: str) -> torch.Tensor:
    """Return relative errors and cosines of the gradient, (2, seeds), and print their means."""
    figures = []
    with moe_layer(f"{MODEL} {RECIPES[recipe]}") as layer:
        for seed in SEEDS:
            x, dy = draw(layer, seed)
            found, exact = gradient(layer, x, dy), in_float64(layer, x, dy)
            cosine = float((found * exact).sum() / found.norm() / exact.norm())
            figures.append((distance(found, exact), cosine))
    both = torch.tensor(figures, dtype=torch.float64).t()
    for name, values in zip(("relative error", "cosine"), both, strict=True):
        standard_error = values.std() / len(SEEDS) ** 0.5
        print(f"{recipe}: {name} {values.mean():.6f} ± {standard_error:.6f}")
    return both


@on_a_cpu
def test_a_gradient_in_bf16_has_the_error_of_bf16():
    errors, cosines = errors_and_cosines("bf16")
    assert 2**-9 < errors.mean() < 2**-7
    assert cosines.min() > 1 - 2**-14


@on_a_cpu
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_gradient_has_the_errors_of_two_gemms(recipe):
    """Both halves of fc1's output have an error of fprop's, fc2's dgrad one of dgrad's.

    They are independent, and orthogonal to the gradient, which they do not shrink.
    """
    fprop = gemm_error(recipe, Gemm.FPROP, (Role.INPUT, Role.WEIGHT))
    dgrad = gemm_error(recipe, Gemm.DGRAD, (Role.GRAD, Role.WEIGHT))
    errors, cosines = errors_and_cosines(recipe)
    assert float(errors.mean()) == pytest.approx((2 * fprop**2 + dgrad**2) ** 0.5, rel=0.1)
    assert float(1 - cosines.mean()) == pytest.approx(float(errors.square().mean()) / 2, rel=0.1)


@on_a_cpu
@pytest.mark.parametrize(
    ("recipe", "draws"),
    [("fp8-tile", 1), ("mxfp8", 1), pytest.param("nvfp4", 48, marks=pytest.mark.slow)],
)
def test_a_gradient_is_that_of_the_quantized_operands(recipe, draws):
    """Nothing else is quantized, and stochastic rounding of fc2's gradient leaves no bias."""
    with moe_layer(f"{MODEL} {RECIPES[recipe]}") as layer:
        x, dy = draw(layer, 0)
        found = torch.stack([gradient(layer, x, dy, key) for key in range(draws)])
        expected = in_float64(layer, x, dy, quantizer_of(recipe, unbiased=True))
        nearest = in_float64(layer, x, dy, quantizer_of(recipe, "grad.rounding=nearest"))
        exact = in_float64(layer, x, dy)
    bound = 2**-7  # of BF16
    if draws > 1:
        bound += 1.3 * float(found.var(0).sum().div(draws).sqrt() / expected.norm())
        assert distance(nearest, expected) > 2 * bound  # a bias would be seen
    assert distance(found.mean(0), expected) < bound < distance(exact, expected) / 3
