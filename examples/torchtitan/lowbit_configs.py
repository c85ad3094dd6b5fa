"""Configs of torchtitan that train its Llama 3 models under a recipe.

Run one from this folder, with a tokenizer and text of your own:

    torchrun --nproc-per-node 1 -m torchtitan.train --module lowbit_configs --config debug_nvfp4 \\
        --hf_assets_path TOKENIZER --dataloader.dataset_path TEXT
"""

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer

from megatron_lowbit.integrations.torchtitan import LowbitConverter


def debug_nvfp4() -> Trainer.Config:
    """Return the debug model, with six blocks, of which the recipe keeps the last in BF16."""
    config = llama3_debugmodel()
    converter = LowbitConverter.Config(recipe="nvfp4")
    config.model_spec = model_registry("debugmodel", converters=[converter])
    return config


def debug_fp8_tile() -> Trainer.Config:
    """Return the debug model in FP8 with tiles."""
    config = llama3_debugmodel()
    converter = LowbitConverter.Config(recipe="fp8-tile")
    config.model_spec = model_registry("debugmodel", converters=[converter])
    return config


def llama3_8b_fp8_tile() -> Trainer.Config:
    """Return Llama 3 8B in FP8 with tiles."""
    config = llama3_8b()
    converter = LowbitConverter.Config(recipe="fp8-tile")
    config.model_spec = model_registry("8B", converters=[converter])
    return config
