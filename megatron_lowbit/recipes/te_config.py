"""Recipes as Megatron-LM's own scripts take them: factories by name, and a file of layers."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import yaml

from megatron_lowbit.errors import require
from megatron_lowbit.numerics import Rounding
from megatron_lowbit.numerics.precision import LinearPrecision
from megatron_lowbit.recipes.load import load_recipe, shipped_recipes
from megatron_lowbit.recipes.matchers import GlobMatcher, Layer, Matcher
from megatron_lowbit.recipes.recipe import Recipe

FACTORIES = "megatron_lowbit.factories"
"""Module whose attributes are the factories."""


def factory_precision(name: str) -> LinearPrecision:
    """Return the precision that a factory's name stands for.

    Raises AttributeError where no shipped recipe or config has this name, and as
    :func:`factory_names`.
    """
    recipes = {_identifier(recipe): recipe for recipe in shipped_recipes()}
    stem = name.partition("__")[0]
    if stem in recipes:
        recipe = load_recipe(recipes[stem])
        for config, factory in factory_names(recipe).items():
            if factory == name:
                return recipe.configs[config]
    raise AttributeError(f"module {FACTORIES} has no factory {name}: `lowbit-recipes list` names "
                         "the recipes; use underscores for hyphens")  # fmt: skip


def factory_names(recipe: Recipe) -> dict[str, str]:
    """Return the names of the factories of a recipe's quantizing configs, by the config.

    Raises UserError where nothing is quantized, or the recipe needs what Transformer Engine's
    modules do not have: switches, amaxes of earlier steps, a fallback, hot channels, or random
    numbers in fprop.
    """
    quantizing = {name: p for name, p in recipe.configs.items() if p.quantized}
    require(bool(quantizing), f"recipe {recipe.name} quantizes nothing: omit the factory")
    precisions = quantizing.values()
    # Recomputation draws other numbers than the forward pass that it repeats.
    random = any(
        p.fprop.redraws_rhs or (p.fprop.lhs and p.fprop.lhs.rounding is Rounding.STOCHASTIC)
        for p in precisions
    )
    lacking = {
        "switches": recipe.switches,
        "oscillation": recipe.oscillation,
        "a backward recipe": recipe.backward,
        "output_layer": recipe.output_layer,
        "amax_history": any(p.history_length for p in precisions),
        "fallback or hot_channels": any(p.keeps_sources for p in precisions),
        "random numbers in fprop": random,
    }
    for what, needed in lacking.items():
        require(not needed, f"recipe {recipe.name} has {what}, which a quantizer factory cannot "
                "have: train by lowbit-pretrain")  # fmt: skip
    stem = _identifier(recipe.name)
    alone = len(quantizing) == 1
    return {name: stem if alone else f"{stem}__{_identifier(name)}" for name in quantizing}


def te_config(recipe: Recipe, layers: Sequence[Layer], stages: int) -> str:
    """Return the YAML file for ``--te-precision-config-file`` that gives a model a recipe.

    Evaluations are in BF16, as by default in training. Raises UserError as :func:`factory_names`,
    and where the recipe selects blocks by number and there are several pipeline ``stages``, in each
    of which Megatron-LM counts from 0.

    Source: ``RecipeConfig`` and ``TEQuantizationParams`` of megatron-core 0.19.2.
    """
    factories = factory_names(recipe)
    matchers = {}
    for name, matcher in recipe.matchers.items():
        patterns = list(_patterns(matcher, layers))
        numbered = any(re.search(r"layers\.[\[\d]", pattern) for pattern in patterns)
        require(stages == 1 or not numbered, f"recipe {recipe.name} selects layers by number "
                f"({name}), and Megatron-LM numbers each pipeline stage from 0: give "
                "--pipeline-model-parallel-size 1, or train by lowbit-pretrain")  # fmt: skip
        for number, pattern in enumerate(patterns):
            key = name if len(patterns) == 1 else f"{name}_{number}"
            matchers[key] = dict(type="glob", pattern=pattern, config=matcher.config, enabled=True)
    customs = {name: custom_recipe(f"{FACTORIES}.{each}") for name, each in factories.items()}
    configs = {name: module_config(customs.get(name)) for name in recipe.configs}
    return yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False)


def custom_recipe(factory: str) -> dict[str, Any]:
    """Return the fields of megatron-core's recipe whose quantizers a factory makes, by its path."""
    return {"fp8_quantization_recipe": "custom", "custom_recipe_factory": factory}


def module_config(recipe: dict[str, Any] | None, evaluates: bool = False) -> dict[str, Any]:
    """Return megatron-core's configuration of a module; None is high precision."""
    training = {**recipe, "override_nonquantized_autocast": True} if recipe else {}
    return {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": training,
        "evaluation_recipe": training if evaluates else {},
    }


def _patterns(matcher: Matcher, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield glob patterns that match what a matcher does, whole blocks by one pattern each."""
    if isinstance(matcher, GlobMatcher):
        yield matcher.pattern
        return
    for _, members in groupby(layers, key=lambda layer: layer.block):
        block = list(members)
        matched = [layer.path for layer in block if matcher.matches(layer)]
        # Local experts are listed by their first.
        paths = [path.replace(".local_experts.0.", ".local_experts.*.") for path in matched]
        if len(matched) == len(block):
            end = paths[0].index(".", paths[0].index("layers.") + len("layers."))
            paths = [f"{paths[0][:end]}.*"]
        yield from paths


def _identifier(name: str) -> str:
    """Return a name with underscores for hyphens."""
    return name.replace("-", "_")
