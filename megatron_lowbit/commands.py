"""Entry points of the installed commands. A command imports no more than it needs."""

from functools import partial
from typing import NoReturn

from megatron_lowbit.command_line import print_cached_help
from megatron_lowbit.errors import exit_on_user_error


def pretrain(hybrid: bool | None = None) -> NoReturn:
    """Run ``lowbit-pretrain``; ``hybrid`` is the model that a script is for, None for either."""
    print_cached_help("pretrain")
    from megatron_lowbit.megatron.pretrain import main

    exit_on_user_error(partial(main, hybrid=hybrid))


def tokenizer() -> NoReturn:
    """Run ``lowbit-tokenizer``."""
    from megatron_lowbit.data.tokenizer_command import main

    exit_on_user_error(main)


def preprocess() -> NoReturn:
    """Run ``lowbit-preprocess``."""
    from megatron_lowbit.data.preprocess_command import main

    exit_on_user_error(main)


def convert() -> NoReturn:
    """Run ``lowbit-convert``."""
    from megatron_lowbit.conversion.command import main

    exit_on_user_error(main)


def checkpoint() -> NoReturn:
    """Run ``lowbit-checkpoint``."""
    from megatron_lowbit.checkpoints.command import main

    exit_on_user_error(main)


def study() -> NoReturn:
    """Run ``lowbit-study``."""
    from megatron_lowbit.study.command import main

    exit_on_user_error(main)


def plan() -> NoReturn:
    """Run ``lowbit-plan``."""
    from megatron_lowbit.planning.command import main

    exit_on_user_error(main)


def recipes() -> NoReturn:
    """Run ``lowbit-recipes``; the same as ``python -m megatron_lowbit.recipes``."""
    from megatron_lowbit.recipes.command import main

    exit_on_user_error(main)
