"""Layouts of quantized weights that other programs read."""

from megatron_lowbit.conversion.layouts.by_module import COMPRESSED_TENSORS, FP8_BLOCKS, MODELOPT
from megatron_lowbit.conversion.layouts.gpt_oss import GPT_OSS

_ALL = (FP8_BLOCKS, COMPRESSED_TENSORS, MODELOPT, GPT_OSS)
LAYOUTS = {layout.name: layout for layout in _ALL}
"""Layouts by their names on the command line."""
METHODS = {layout.method: layout for layout in _ALL}
"""Layouts by config.json's ``quant_method``."""
