"""A checkpoint's model, built and loaded by the training code of Megatron-LM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.recipe_hook import RecipeHook, model_config_of
from megatron_lowbit.planning.training_arguments import silenced
from megatron_lowbit.recipes import Recipe

_RUN = (
    "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--eval-interval", "1",
    "--skip-train", "--finetune", "--transformer-impl", "local", "--mock-data",
    "--tokenizer-type", "NullTokenizer",
    # Local layers on a GPU, without Apex.
    "--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion",
    "--no-rope-fusion", "--no-create-attention-mask-in-dataloader",
)  # fmt: skip


@contextmanager
def loaded_model(
    checkpoint: Path, arguments: Sequence[str], recipe: Recipe | None = None
) -> Iterator[torch.nn.Module]:
    """Build a model of local layers in FP32, load a checkpoint into it, and yield this rank's part.

    It is for evaluation. ``arguments`` describe the model, its sequences and its parallelism;
    ``recipe`` is the precision of its linear layers, None leaves them as they are.
    """
    with pretrain.teardown():
        with silenced():
            args = parse_arguments([*arguments, *_RUN, "--load", str(checkpoint)])
            model_config = model_config_of(args)
            if recipe is not None:
                model_config.pre_wrap_hooks.append(RecipeHook(recipe, args))
            container = pretrain_cfg_container_from_args(args, model_config)
            initialize_megatron(store=pretrain.rendezvous_store(args))
            [model], _, _ = setup_model_and_optimizer(
                ModelType.encoder_or_decoder,
                cfg_container=container,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
        yield model.eval()
