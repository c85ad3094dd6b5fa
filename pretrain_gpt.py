"""Pretrain a GPT in low precision: ``pretrain_gpt.py --fp4-recipe nvfp4 ...``."""

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.training import command


def main() -> None:
    """Parse, build, train."""
    command.main(hybrid=False)


if __name__ == "__main__":
    exit_on_user_error(main)
