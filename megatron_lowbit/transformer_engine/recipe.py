"""A recipe of this project as an object that Transformer Engine's ``autocast`` takes."""

from typing import Any

import torch
from transformer_engine.common import recipe as te_recipes

from megatron_lowbit.errors import require
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.recipes import LinearPrecision, Recipe, load_precision
from megatron_lowbit.transformer_engine.native import Native, native_recipe
from megatron_lowbit.transformer_engine.quantizers import Factory


def to_te_recipe(
    recipe: Recipe | LinearPrecision, capability: tuple[int, int] | None = None
) -> te_recipes.Recipe:
    """Return Transformer Engine's recipe for the linear layers that a recipe quantizes.

    Its own where it has kernels for the formats on a GPU of this compute capability (by default the
    present one), else a CustomRecipe with this project's quantizers and GEMMs.

    Raises:
        UserError: Transformer Engine's recipe lacks a switch that is set; the recipe quantizes
            nothing, not all of its layers alike, or changes during a run.
    """
    precision = load_precision(recipe)
    require(precision.quantized, "nothing is quantized: use autocast(enabled=False)")
    native = native_recipe(precision, capability or torch.cuda.get_device_capability())
    if native is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return te_recipes.CustomRecipe(qfactory=Factory(precision, select_engine(device)))
    return build(native)


def build(native: Native) -> te_recipes.Recipe:
    """Return the object that is described."""
    arguments: dict[str, Any] = dict(native.arguments)
    if "fp8_format" in arguments:
        arguments["fp8_format"] = te_recipes.Format[arguments["fp8_format"]]
    recipe = getattr(te_recipes, native.name)(**arguments)
    if native.power_2_scale is not None:
        parameters = te_recipes.QParams(power_2_scale=native.power_2_scale)
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            setattr(recipe, name, parameters)
    return recipe
