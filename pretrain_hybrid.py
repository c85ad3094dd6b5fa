"""Pretrain a Mamba-Transformer hybrid in low precision."""

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.training import command


def main() -> None:
    """Parse, build, train."""
    command.main(hybrid=True)


if __name__ == "__main__":
    exit_on_user_error(main)
