"""Hook of slime and miles, which train with Megatron-LM's arguments and a loop of their own."""

from argparse import Namespace
from typing import Any

_STEPS = 2**16
"""More steps than one rollout is trained for."""


def before_train_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    """Tell the quantizer factories which step begins, as Megatron-LM's own loop does.

    For ``--custom-megatron-before-train-step-hook-path``. Random numbers are then a function of
    the seed, the rollout and its step, so that a resumed run draws the same ones.

    Args:
        args: Megatron-LM's global arguments.
        rollout_id: number of the rollout that is trained on, from 0.
        step_id: number of the step within the rollout, from 0.
        model, optimizer, opt_param_scheduler: not used.
    """
    args.curr_iteration = rollout_id * _STEPS + step_id
