"""Public names of :mod:`megatron_lowbit.arguments`, for scripts that build on this package."""

from megatron_lowbit.arguments import add_recipe_arguments, front_parser, parse_arguments

__all__ = ["add_recipe_arguments", "front_parser", "parse_arguments"]
