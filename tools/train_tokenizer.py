"""``lowbit-tokenizer``, in a checkout."""

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.data.tokenizer_command import main

if __name__ == "__main__":
    exit_on_user_error(main)
