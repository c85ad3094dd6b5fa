"""Configuration of the model that arguments describe."""

from argparse import Namespace
from typing import Any

from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

from megatron_lowbit.megatron.hybrid import use_local_stack
from megatron_lowbit.megatron.mamba import use_best_scan
from megatron_lowbit.megatron.rank_errors import say_on_rank_0
from megatron_lowbit.megatron.recipe_hook import use_recipe
from megatron_lowbit.megatron.workarounds import apply_ignored_arguments


def model_config_of(args: Namespace) -> Any:
    """Return Megatron-LM's configuration of the arguments' model, with its recipe as a hook.

    Raises:
        UserError: the recipe or another argument does not fit the others.
    """
    if args.hybrid_layer_pattern is None:
        model_config = gpt_config_from_args(args)
    else:
        model_config = hybrid_config_from_args(args)
        use_local_stack(model_config)
        say_on_rank_0(f"Mamba scan: {use_best_scan()}")
    for line in apply_ignored_arguments(model_config, args):
        say_on_rank_0(line)
    use_recipe(model_config, args)
    return model_config
