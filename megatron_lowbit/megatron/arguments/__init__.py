"""Command line of the pretraining programs.

:func:`parse_arguments` reads the command line with a parser that also knows Megatron-LM's
arguments, translates it into arguments that Megatron-LM supports on this machine, and passes these
to Megatron-LM's own parsing and validation.
"""

from megatron_lowbit.megatron.arguments.parse import parse_arguments
from megatron_lowbit.megatron.arguments.parser import add_recipe_arguments, front_parser

__all__ = ["add_recipe_arguments", "front_parser", "parse_arguments"]
