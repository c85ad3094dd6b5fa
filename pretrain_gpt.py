"""Pretrain a GPT in low precision: ``python pretrain_gpt.py --fp4-recipe nvfp4 ...``."""

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.training.arguments import parse_arguments


def main() -> None:
    """Parse, build, train."""
    args = parse_arguments()
    # After parsing: --help and a wrong argument need not wait for torch and megatron.
    from megatron_lowbit.training.pretrain import pretrain

    pretrain(args)


if __name__ == "__main__":
    exit_on_user_error(main)
