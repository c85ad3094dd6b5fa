"""Pretrain a Mamba-Transformer hybrid in low precision."""

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.training.script import run_script


def main() -> None:
    """Parse, build, train."""
    run_script(hybrid=True)


if __name__ == "__main__":
    exit_on_user_error(main)
