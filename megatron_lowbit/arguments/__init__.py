"""Command line of the pretraining programs.

:func:`parse_arguments` reads the command line with a parser that also knows Megatron-LM's
arguments, translates it into arguments that Megatron-LM supports on this machine, and passes these
to Megatron-LM's own parsing and validation.
"""

import megatron_lowbit.cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron_lowbit.arguments.parse import parse_arguments
from megatron_lowbit.arguments.parser import add_recipe_arguments, front_parser

__all__ = ["add_recipe_arguments", "front_parser", "parse_arguments"]
