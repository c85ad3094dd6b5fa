"""Entry points of the installed commands. A command imports no more than it needs."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NoReturn

from megatron_lowbit.errors import exit_on_user_error


def pretrain(hybrid: bool | None = None) -> NoReturn:
    """Run ``lowbit-pretrain``; ``hybrid`` is the model that a script is for, None for either."""
    from megatron_lowbit.megatron.pretrain import main

    exit_on_user_error(partial(main, hybrid=hybrid))


def _command(module: str) -> Callable[[], NoReturn]:
    """Return the function that runs the command of a module.

    SIGTERM ends it as an exception does, so that it ends its processes and deletes its files.
    """

    def run() -> NoReturn:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        exit_on_user_error(lambda: import_module(f"megatron_lowbit.{module}").main())

    return run


tokenizer = _command("data.tokenizer")
preprocess = _command("data.preprocess")
convert = _command("conversion.command")
checkpoint = _command("checkpoints.command")
study = _command("study.command")
plan = _command("planning.command")
recipes = _command("recipes.command")
"""``lowbit-recipes``, and ``python -m megatron_lowbit.recipes``."""
