"""Channels with the largest quantization errors, which a second product makes good."""

import numpy as np
import pytest
import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.layers.hot_channels import add_hot_channels
from megatron_lowbit.recipes import load_recipe
from tests.layers.test_fallback import ENGINE, leaves, next_precision, run

FP32_SUMS = 2e-6  # of the largest number


def product(x, weight, share, quantizers) -> np.ndarray:
    """Compute the formula in FP64, with loops over channels and outputs."""
    sides = []
    for tensor, quantizer in zip((x, weight), quantizers, strict=True):
        tensor = tensor.detach()
        values = quantizer(tensor).dequantize().double().numpy()
        sides.append((tensor.double().numpy(), values))
    (x, made_x), (w, made_w) = sides
    channels = range(x.shape[1])
    scores = [abs(x - made_x)[:, j].mean() + abs(w - made_w)[:, j].mean() for j in channels]
    hot = sorted(channels, key=lambda j: -scores[j])[: max(1, round(share * len(scores)))]
    total = np.zeros((len(x), len(w)))
    for j in channels:
        if j in hot:  # but for the error of second order
            total += np.outer(x[:, j], w[:, j])
            total -= np.outer(x[:, j] - made_x[:, j], w[:, j] - made_w[:, j])
        else:
            total += np.outer(made_x[:, j], made_w[:, j])
    return total


@pytest.mark.parametrize("share", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8-tile"])
def test_products_are_the_formula_s_and_gradients_the_recipe_s(name, share):
    x, weight, bias, dy = leaves()
    with torch.no_grad():
        x *= torch.linspace(0.1, 9, x.shape[1])  # channels of other magnitudes
    plain, hot = (next_precision(name, s) for s in ([], [f"fprop.hot_channels={share}"]))
    y, *gradients = run(x, weight, bias, dy, hot)
    expected = product(x, weight, share, hot.fprop.sides) + bias.double().numpy()
    assert np.abs(y.double().numpy() - expected).max() <= FP32_SUMS * np.abs(expected).max()
    before, *others = run(x, weight, bias, dy, plain)
    torch.testing.assert_close(gradients, others, rtol=0, atol=0)
    exact = torch.nn.functional.linear(x, weight, bias)
    assert (y - exact).norm() < (before - exact).norm()


def test_operands_as_a_gpu_writes_them():
    """In BF16 the fused engine's operands give the reference's product."""
    x, weight, _, _ = leaves(torch.bfloat16, m=48, n=64, k=64)
    precision, seen = next_precision("nvfp4", ["fprop.hot_channels=0.1"]), []
    for engine in (ReferenceEngine("tests"), FusedEngine((9, 0))):
        context = LinearContext(precision, engine, 3)
        # In training the fused engine writes square blocks once, for both passes.
        pair = (
            context.quantize(tensor.detach(), role, "fprop", col)[0]
            for tensor, role, col in ((x, "input", None), (weight, "weight", "dgrad"))
        )
        seen.append(add_hot_channels(torch.zeros(48, 64, dtype=torch.bfloat16), *pair, 0.1))
    assert torch.equal(*seen) and seen[0].any()


def test_inputs_without_rows_or_columns():
    precision = next_precision("nvfp4", ["fprop.hot_channels=0.1"])
    for shape in ((0, 64), (32, 0)):
        context = LinearContext(precision, ENGINE, 3)
        x, weight = torch.ones(shape), torch.ones(16, shape[1])
        assert not lowbit_linear(x, weight, context).any()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (["wgrad.hot_channels=0.1"], "wgrad.hot_channels: only fprop takes it"),
        (["fprop.hot_channels=0"], "fprop.hot_channels: .*greater than 0"),
        (["fprop.hot_channels=1.5"], "fprop.hot_channels: .*less than or equal to 1"),
        (["fprop.input=null", "fprop.hot_channels=0.1"], "hot_channels needs both operands"),
        (["fprop.hadamard.size=16", "fprop.hot_channels=0.1"], "hot_channels: not with a hadamard"),
    ],
)
def test_what_it_does_not_go_with(changes, error):
    with pytest.raises(UserError, match=error):
        load_recipe("nvfp4", changes)


def test_the_table_of_a_recipe_says_so():
    assert "hot channels 0.1" in str(next_precision("nvfp4", ["fprop.hot_channels=0.1"]))
