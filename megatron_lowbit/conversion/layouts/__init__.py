"""Layouts of quantized weights that other programs read: one module each."""

from megatron_lowbit.conversion.layouts import compressed_tensors, fp8_blocks, gpt_oss, modelopt
from megatron_lowbit.conversion.layouts.layout import Layout, ModuleFormats, Stored

_MODULES = (fp8_blocks, compressed_tensors, modelopt, gpt_oss)
LAYOUTS = {module.LAYOUT.name: module.LAYOUT for module in _MODULES}
"""Layouts by their names on the command line."""
METHODS = {module.METHOD: module.LAYOUT for module in _MODULES}
"""Layouts by config.json's ``quant_method``."""

__all__ = ["LAYOUTS", "METHODS", "Layout", "ModuleFormats", "Stored"]
