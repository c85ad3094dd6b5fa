"""Take recipes into a training script of your own on Megatron-LM 0.19: three lines.

    torchrun --nproc-per-node 8 examples/own_script.py --precision-recipe nvfp4 ...

The rest of the script is Megatron-LM's usual one. Datasets and forward pass are taken from this
package here, as are the ranks that share the embedding; a script keeps its own.
"""

from functools import partial

import megatron_lowbit.megatron  # noqa: F401  before megatron on a machine without CUDA

# isort: split
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.megatron.arguments import add_recipe_arguments
from megatron_lowbit.megatron.datasets import provide_datasets
from megatron_lowbit.megatron.forward_step import forward_step
from megatron_lowbit.megatron.recipe_hook import use_recipe
from megatron_lowbit.megatron.run.pipeline import embedding_ranks


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=add_recipe_arguments)  # 1: the arguments
    model_config = gpt_config_from_args(args)
    use_recipe(model_config, args)  # 2: the hook (and 3: the import above)
    container = pretrain_cfg_container_from_args(args, model_config)
    pretrain(
        container,
        provide_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=partial(embedding_ranks, args),
    )


if __name__ == "__main__":
    exit_on_user_error(main)  # a mistake in a recipe or an argument in one line
