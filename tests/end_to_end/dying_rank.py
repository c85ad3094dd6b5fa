"""One rank of a torchrun job in which rank 1 dies or hangs: ``dying_rank.py HARM ITERATION ...``.

What follows are the arguments of a pretraining run. After a restart nothing is harmed any more.
"""

import os
import signal
import sys
import time

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.pretrain import pretrain


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


def main() -> None:
    """Train; rank 1 does itself the harm after the backward pass of that iteration (from 1)."""
    harms = {"dies": die, "hangs": hang, "nothing": lambda: None}
    harm, harmed = harms[sys.argv[1]], int(sys.argv[2])
    unhurt = os.environ["RANK"] != "1" or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"

    def after_backward(iteration: int, model: list) -> None:
        if iteration + 1 == harmed and not unhurt:
            print(f"harmed at {time.time()}", flush=True)
            harm()

    pretrain(parse_arguments(sys.argv[3:]), after_backward=after_backward)


if __name__ == "__main__":
    exit_on_user_error(main)
