"""``lowbit-preprocess``, in a checkout."""

from megatron_lowbit.data.preprocess_command import main
from megatron_lowbit.errors import exit_on_user_error

if __name__ == "__main__":
    exit_on_user_error(main)
