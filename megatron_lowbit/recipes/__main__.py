"""Entry point of ``python -m megatron_lowbit.recipes``."""

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.recipes.command import main

if __name__ == "__main__":
    exit_on_user_error(main)
