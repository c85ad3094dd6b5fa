"""Configs of torchtitan that train its Llama 3 models under a recipe.

Run one from this folder, with a tokenizer and text of your own:

    torchrun --nproc-per-node 1 -m torchtitan.train --module lowbit_configs --config debug_nvfp4 \\
        --hf_assets_path TOKENIZER --dataloader.dataset_path TEXT
"""

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer

from megatron_lowbit.integrations.torchtitan import LowbitConverter


def _with_recipe(config: Trainer.Config, flavor: str, recipe: str) -> Trainer.Config:
    converter = LowbitConverter.Config(recipe=recipe)
    config.model_spec = model_registry(flavor, converters=[converter])
    config.training.disable_cuda_graphs = True  # A graph would repeat random numbers.
    return config


def debug_nvfp4() -> Trainer.Config:
    """Return the debug model, whose first and last of six blocks the recipe keeps in BF16."""
    return _with_recipe(llama3_debugmodel(), "debugmodel", "nvfp4")


def debug_fp8_tile() -> Trainer.Config:
    """Return the debug model in FP8 with tiles."""
    return _with_recipe(llama3_debugmodel(), "debugmodel", "fp8-tile")


def llama3_8b_fp8_tile() -> Trainer.Config:
    """Return Llama 3 8B in FP8 with tiles."""
    return _with_recipe(llama3_8b(), "8B", "fp8-tile")
