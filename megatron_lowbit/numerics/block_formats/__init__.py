"""The block-scaled formats: one module each, and each module's ``FORMATS`` is found from here."""

from importlib import import_module
from pkgutil import iter_modules

from megatron_lowbit.numerics.block_format import BlockFormat

FORMATS: dict[str, BlockFormat] = {
    format.name: format
    for module in iter_modules(__path__, prefix=f"{__name__}.")
    for format in import_module(module.name).FORMATS
}
"""Every format by name, with its default options."""
