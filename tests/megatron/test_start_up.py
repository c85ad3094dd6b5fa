"""Start-up lines about the products of a recipe, on any machine."""

import pytest

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.megatron.recipe_hook import _products
from megatron_lowbit.megatron.run.dry_run import _PlannedEngine
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.recipes.show import model_layers

TILES = "fp8-1x128-e4m3 pow2 x fp8-128x128-e4m3 pow2"
NARROW = "fprop.accumulation={inner: bf16, promote_every: 128}"


def lines(engine, *overrides, name="fp8-tile"):
    return list(_products(load_recipe(name, overrides), engine, model_layers(None, 4)))


@pytest.mark.parametrize("engine", [ReferenceEngine("asked for"), _PlannedEngine((9, 0))])
def test_sums_are_those_of_the_recipe(engine):
    """Emulated sums are the same on every device; other GEMMs keep the engine's."""
    plain, changed = lines(engine), lines(engine, NARROW)
    narrow = f"  fprop, {TILES}: dequantized to FP32, BF16 sums of 128 products, added in FP32"
    assert narrow in changed and narrow not in plain
    assert len(changed) == len(plain) and len(set(changed) - set(plain)) == 1
    (never,) = set(lines(engine, "wgrad.accumulation={inner: fp8, promote_every: null}")) - {*plain}
    assert never.startswith("  wgrad, ") and never.endswith(": dequantized to FP32, FP8 sums")


def test_a_gemm_in_high_precision_with_narrow_sums_is_named():
    accumulation = "accumulation={inner: bf16, promote_every: 64}"
    shown = lines(ReferenceEngine("asked for"), f"configs.bf16.fprop.{accumulation}", name="bf16")
    assert shown == [
        "  fprop, bf16 x bf16: dequantized to FP32, BF16 sums of 64 products, added in FP32"
    ]


def test_products_that_are_not_folded_are_named():
    engine = _PlannedEngine((9, 0))
    folded, plain = lines(engine, name="mxfp8"), lines(engine, "folding=false", name="mxfp8")
    assert all("folded to FP8 tensors" in line for line in folded)
    assert all("exact BF16, FP32" in line for line in plain)
