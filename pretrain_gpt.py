"""Pretrain a GPT in low precision: ``python pretrain_gpt.py --fp4-recipe nvfp4 ...``."""

import warnings

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.training.arguments import parse_arguments


def main() -> None:
    """Parse, build, train."""
    args = parse_arguments()
    # Advice to megatron-core's own developers, and that Apex is absent: nothing a user can act on.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    # After parsing: --help and a wrong argument need not wait for torch and megatron.
    from megatron_lowbit.training.pretrain import pretrain

    pretrain(args)


if __name__ == "__main__":
    exit_on_user_error(main)
