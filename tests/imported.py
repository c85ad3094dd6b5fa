"""Imports of what pretraining imports sooner or later.

Tests that train in their own process import it while they are collected: what is imported later,
each run would go through in its garbage collection, and each forked process would import.
"""

import gc
import os

import torch._dynamo  # noqa: F401  by torch's optimizers

import megatron_lowbit.megatron.pretrain  # noqa: F401  before megatron

# isort: split
import megatron.core.tokenizers.text.libraries.huggingface_tokenizer
import megatron.training.training  # noqa: F401

if "TRITON_INTERPRET" in os.environ:
    import tests.interpreter  # noqa: F401

gc.collect()
gc.freeze()
