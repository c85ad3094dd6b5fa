"""The commands that are installed: each a ``main`` of the package, ended as the scripts are.

A command imports no more than its own.
"""

from typing import NoReturn

from megatron_lowbit.errors import exit_on_user_error


def pretrain() -> NoReturn:
    """``lowbit-pretrain``."""
    from megatron_lowbit.training.command import main

    exit_on_user_error(main)


def tokenizer() -> NoReturn:
    """``lowbit-tokenizer``."""
    from megatron_lowbit.data.tokenizer_command import main

    exit_on_user_error(main)


def preprocess() -> NoReturn:
    """``lowbit-preprocess``."""
    from megatron_lowbit.data.preprocess_command import main

    exit_on_user_error(main)


def convert() -> NoReturn:
    """``lowbit-convert``."""
    from megatron_lowbit.conversion.command import main

    exit_on_user_error(main)


def plan() -> NoReturn:
    """``lowbit-plan``."""
    from megatron_lowbit.planning.command import main

    exit_on_user_error(main)


def recipes() -> NoReturn:
    """``lowbit-recipes``; the same as ``python -m megatron_lowbit.recipes``."""
    from megatron_lowbit.recipes.show import main

    exit_on_user_error(main)
