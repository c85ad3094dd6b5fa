"""Recipes: the precision of each GEMM of each linear layer, read from YAML."""

from typing import TYPE_CHECKING

from megatron_lowbit.lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lowbit.recipes.load import (
        load_combined,
        load_recipe,
        load_recipes,
        shipped_recipes,
    )
    from megatron_lowbit.recipes.matchers import Layer
    from megatron_lowbit.recipes.precision import (
        HIGH_PRECISION,
        OPERANDS,
        GemmPrecision,
        LinearPrecision,
    )
    from megatron_lowbit.recipes.recipe import Progress, Recipe, combine
    from megatron_lowbit.recipes.table import precision_table

__all__ = [
    "HIGH_PRECISION",
    "OPERANDS",
    "GemmPrecision",
    "Layer",
    "LinearPrecision",
    "Progress",
    "Recipe",
    "combine",
    "load_combined",
    "load_recipe",
    "load_recipes",
    "precision_table",
    "shipped_recipes",
]
__getattr__ = lazy_attributes(
    __name__,
    {
        "load": ["load_combined", "load_recipe", "load_recipes", "shipped_recipes"],
        "matchers": ["Layer"],
        "precision": ["HIGH_PRECISION", "OPERANDS", "GemmPrecision", "LinearPrecision"],
        "recipe": ["Progress", "Recipe", "combine"],
        "table": ["precision_table"],
    },
)
