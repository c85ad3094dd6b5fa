"""Recipes in upstream Megatron-LM's own training, whose layers are Transformer Engine's.

A launcher calls :func:`add_recipes` before it runs Megatron-LM's ``pretrain_gpt.py``: see
docs/megatron-lm.md. Nothing of Megatron-LM is imported before that.
"""

import argparse
import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import Recipe, load_recipe

_UNDERSTOOD = "megatron_lowbit's --precision-recipe"


def add_recipes() -> None:
    """Have ``megatron.training.pretrain`` take ``--precision-recipe`` and ``--recipe-set``."""
    training = importlib.import_module("megatron.training")
    training.pretrain = with_recipes(training.pretrain, training.get_args)


def with_recipes(
    pretrain: Callable[..., Any], get_args: Callable[[], Namespace]
) -> Callable[..., Any]:
    """Megatron-LM's ``pretrain``, with more arguments and a recipe for the model it builds."""

    @wraps(pretrain)
    def wrapper(*positional: Any, **named: Any) -> Any:
        call = inspect.signature(pretrain).bind(*positional, **named)
        provide, extra = call.arguments["model_provider"], call.arguments.get("extra_args_provider")

        @wraps(provide)
        def model_provider(*args: Any, **kwargs: Any) -> torch.nn.Module:
            model = provide(*args, **kwargs)
            apply_recipe(model, get_args(), kwargs.get("vp_stage"))
            return model

        def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            return _add_arguments(parser if extra is None else extra(parser))

        call.arguments |= {
            "model_provider": model_provider, "extra_args_provider": extra_args_provider,
        }  # fmt: skip
        return pretrain(*call.args, **call.kwargs)

    return wrapper


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("megatron-lowbit")
    group.add_argument(
        "--precision-recipe", metavar="NAME_OR_FILE", help="how linear layers are quantized"
    )
    group.add_argument(
        "--recipe-set", metavar="FIELD=VALUE", action="append", default=[],
        help="set one field of the recipe, such as grad.rounding=nearest (repeatable)",
    )  # fmt: skip
    return parser


def apply_recipe(model: torch.nn.Module, args: Namespace, vp_stage: int | None = None) -> None:
    """Give the layers of a model that Megatron-LM built the precision that its arguments name.

    Raises:
        UserError: the recipe or other arguments do not fit.
    """
    if args.precision_recipe is None:
        return
    recipe = load_recipe(args.precision_recipe, args.recipe_set)
    _check(recipe, args)
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron_lowbit.integrations.megatron_core.quant_recipe import QuantRecipe
    from megatron_lowbit.integrations.transformer_engine.layers import take_over
    from megatron_lowbit.kernels.engine import select_engine

    quant_recipe = QuantRecipe(
        recipe,
        model.config.num_layers,
        get_transformer_layer_offset(model.config, vp_stage=vp_stage),
        select_engine(torch.device("cuda")),
        accumulate_main_grad=model.config.gradient_accumulation_fusion,
    )
    for state in take_over(model, quant_recipe, _state_of(args)):
        # Megatron-LM says when weights change only where one recipe is for all layers.
        state.module.disable_parameter_transpose_cache = True


def _check(recipe: Recipe, args: Namespace) -> None:
    if args.transformer_impl != "transformer_engine":
        raise UserError(f"{_UNDERSTOOD} needs --transformer-impl transformer_engine")
    for name in ("fp8", "fp4"):
        if getattr(args, name, None):
            raise UserError(f"{_UNDERSTOOD} excludes Megatron-LM's --{name}-format")
    if getattr(args, "num_experts", None):
        raise UserError(f"{_UNDERSTOOD} is for models without --num-experts")
    if recipe.switches:
        raise UserError(f"recipe {recipe.name}: switches are for this project's own training")
    if any(precision.history_length for precision in recipe.configs.values()):
        raise UserError(f"recipe {recipe.name}: delayed scaling is for this project's own training")


def _state_of(args: Namespace) -> type:
    """The state of a layer whose random numbers follow Megatron-LM's count of iterations."""
    from megatron.core import parallel_state

    from megatron_lowbit.integrations.transformer_engine.layers import TELayerState
    from megatron_lowbit.numerics import derive_key

    class CountedState(TELayerState):
        """Numbers the calls of an iteration, for nothing here says which microbatch it is."""

        iteration, calls = -1, 0

        def microbatch_key(self) -> int:
            """Another one for each call of a layer in an iteration, and for each replica."""
            iteration = getattr(args, "curr_iteration", None) or 0
            self.calls = 0 if iteration != self.iteration else self.calls + 1
            self.iteration = iteration
            replica = parallel_state.get_data_parallel_rank()
            return derive_key(args.seed, iteration, self.calls, replica, self.plan.layer.path)

    return CountedState
