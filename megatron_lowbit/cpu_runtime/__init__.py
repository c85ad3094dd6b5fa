"""CPU runtime: replacements that let megatron.core and megatron.training run without CUDA.

Importing this package installs the replacements on a machine without a CUDA device, and
``typing.override``, which Python 3.11 lacks, on any. Megatron reads some of these names during its
own import, so that this package has to be imported first.

- ``torch_patches``: "cuda" as a device means the CPU, for callers in megatron only. Functions of
  ``torch.cuda`` that move tensors or synchronize do nothing, for all callers.
- ``megatron_patches``: collectives of unequal parts, which gloo lacks; functions without
  ``torch.compile``; empty modules in place of Triton kernels; CUDA random states in torch's CPU
  generator; torch's Adam and norms with the interfaces of Transformer Engine's.
"""

import sys
import typing
import warnings

import torch

from megatron_lowbit.cpu_runtime import megatron_patches
from megatron_lowbit.cpu_runtime.torch_patches import patch_torch

_NOT_INSTALLED = ("Transformer Engine and Apex", "Apex is not", "Only transformer-engine")
"""Beginnings of megatron's warnings that packages for GPUs are not installed."""

if sys.version_info < (3, 12):
    from typing_extensions import override

    typing.override = override  # type: ignore[attr-defined]
if not torch.cuda.is_available():
    if "megatron.core" in sys.modules:
        raise ImportError(
            "megatron.core was imported too early: on a machine without CUDA, import "
            "megatron_lowbit.megatron first"
        )
    patch_torch()
    with warnings.catch_warnings():
        for message in _NOT_INSTALLED:
            warnings.filterwarnings("ignore", message=message)
        megatron_patches.add_missing_triton_modules()
        megatron_patches.import_without_compiler()
        megatron_patches.patch_megatron()
