"""Recipes in Megatron-Bridge: a mixed-precision name per recipe, and a callback.

Importing this module registers ``lowbit_NAME`` for every shipped recipe that Transformer Engine's
modules can compute, with underscores for hyphens. Such a configuration is Megatron-Bridge's
``bf16_mixed`` with Megatron-LM's precision of each layer (``quant_recipe``), whose quantizers are
``megatron_lowbit.factories``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES, MixedPrecisionConfig
from megatron.core.quantization.quant_config import RecipeConfig

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.recipes import Recipe, load_recipe, shipped_recipes
from megatron_lowbit.recipes.show import model_layers
from megatron_lowbit.recipes.te_config import factory_names, te_config


@dataclass(kw_only=True)
class LowbitPrecision(MixedPrecisionConfig):
    """Mixed precision whose linear layers have the precision of a shipped recipe.

    Attributes:
        lowbit_recipe: the recipe's name.
    """

    lowbit_recipe: str

    def setup(
        self, model_config: Any, optimizer_config: Any = None, ddp_config: Any = None
    ) -> None:
        """Give the model's configuration the precision of each layer, and the rest BF16.

        Raises:
            UserError: a recipe that needs Megatron-LM's training loop, or that selects blocks by
                number in a run with pipeline stages; a model with experts or latent attention;
                gradient accumulation fusion.
        """
        super().setup(model_config, optimizer_config, ddp_config)
        recipe = _shipped(self.lowbit_recipe)
        for name in ("num_moe_experts", "multi_latent_attention", "gradient_accumulation_fusion"):
            require(
                not getattr(model_config, name, None),
                f"recipe {recipe.name} in Megatron-Bridge: model.{name} is not supported with "
                "quantizer factories; unset it, or train by lowbit-pretrain",
            )
        layers = model_layers(None, model_config.num_layers)
        recipe.check_matchers(layers)
        text = te_config(recipe, layers, model_config.pipeline_model_parallel_size)
        model_config.quant_recipe = RecipeConfig.from_config_dict(yaml.safe_load(text))


class LowbitCallback(Callback):
    """Make random numbers of a recipe a function of the run's seed and step.

    Without it the quantizers draw from torch's CPU generator.
    """

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Tell the quantizer factories the seed and the step that begins."""
        from megatron_lowbit.transformer_engine.named import announce_step

        announce_step(context.state.cfg.rng.seed, context.state.train_state.step)


def lowbit_precision(recipe: str) -> LowbitPrecision:
    """Return the mixed-precision configuration of a shipped recipe.

    Raises:
        UserError: no shipped recipe of this name, or one that quantizer factories cannot compute.
    """
    factory_names(_shipped(recipe))
    bf16 = MIXED_PRECISION_RECIPES["bf16_mixed"]()
    return LowbitPrecision(lowbit_recipe=recipe, **vars(bf16))


def _shipped(name: str) -> Recipe:
    known = shipped_recipes()
    require(name in known, f"recipe={name!r} is not a shipped recipe: {', '.join(known)}")
    return load_recipe(name)


def _register() -> None:
    for name in shipped_recipes():
        try:
            factory_names(_shipped(name))
        except UserError:
            continue  # The page lists them; asking for one by lowbit_precision names the reason.
        key = f"lowbit_{name.replace('-', '_')}"
        MIXED_PRECISION_RECIPES[key] = partial(lowbit_precision, name)


_register()
