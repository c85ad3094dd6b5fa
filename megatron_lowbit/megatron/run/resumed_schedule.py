"""Learning rates and schedule of a resumed run: this run's or the checkpoint's, as arguments say.

Megatron-LM 0.19.2 finds a checkpoint's optimizer groups by their learning rates. It therefore fails
with another ``--lr``, ``--min-lr``, ``--decoupled-lr`` or ``--decoupled-min-lr``, whatever
``--override-opt_param-scheduler`` and ``--use-checkpoint-opt_param-scheduler`` say. The loaded
groups are made equal to the optimizer's here before Megatron-LM compares them.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache, wraps
from itertools import zip_longest
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    param_group_identifier_keys,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import get_args

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run.errors import say_on_rank_0

_RATES = ("max_lr", "min_lr")
_STRUCTURE = [key for key in param_group_identifier_keys if key not in _RATES]
_RESTORED = {"betas": "--adam-beta1 and --adam-beta2", "eps": "--adam-eps",
             "momentum": "--sgd-momentum"}  # fmt: skip
"""Settings of a group that the checkpoint's replace, with the arguments that set them."""
_ARGUMENTS = {
    "learning rate": "--lr",
    "minimum learning rate": "--min-lr",
    "warmup iterations": "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction, or "
    "--global-batch-size",
    "total number of iterations": "--lr-decay-iters or --lr-decay-samples, by default --train-iters"
    " or --train-samples, or --global-batch-size",
    "learning rate decay style": "--lr-decay-style",
    "start weight decay": "--weight-decay or --start-weight-decay",
    "end weight decay": "--weight-decay or --end-weight-decay",
    "total number of weight decay iterations": "--train-iters or --train-samples, or "
    "--global-batch-size",
    "weight decay incr style": "--weight-decay-incr-style",
}
"""Arguments that set a value of the scheduler, by Megatron-LM's name of the value."""
_SAMPLES = {
    "warmup iterations": "number of warmup samples",
    "total number of iterations": "total number of samples",
    "total number of weight decay iterations": "total number of weight decay samples",
}
"""Right names of the values that Megatron-LM calls iterations and counts in samples."""
_CHOICE = (
    "--override-opt_param-scheduler takes this run's schedule, "
    "--use-checkpoint-opt_param-scheduler the checkpoint's"
)

Group = dict[str, Any]


def _reconciling(load: Any) -> Any:
    """Return a ``load_state_dict`` that makes the loaded groups equal to the optimizer's first."""

    @wraps(load)
    def wrapped(self: Any, state: dict[str, Any]) -> None:
        for group, saved in _pairs(self, state):
            _reconcile(group, saved)
        load(self, state)

    return wrapped


@cache
def follow_schedule_arguments() -> None:
    """Let resumed runs take their schedule from where the arguments say; once in a process."""
    for optimizer_class in (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer):
        optimizer_class.load_state_dict = _reconciling(optimizer_class.load_state_dict)
    load_scheduler = OptimizerParamScheduler.load_state_dict

    @wraps(load_scheduler)
    def load(self: OptimizerParamScheduler, state: dict[str, Any]) -> None:
        load_scheduler(self, state)
        # Megatron-LM computes the next step's weight decay before it loads the decay's schedule.
        self.step(0)

    OptimizerParamScheduler.load_state_dict = load
    OptimizerParamScheduler._check_and_set = _choose


def _choose(scheduler: OptimizerParamScheduler, value: Any, saved: Any, name: str) -> Any:
    """Return this run's or the checkpoint's value; raise UserError if neither is asked for."""
    if scheduler.override_opt_param_scheduler:
        return value
    if value != saved and not scheduler.use_checkpoint_opt_param_scheduler:
        raise UserError(
            f"{_ARGUMENTS.get(name, name)}: the {_SAMPLES.get(name, name)} is {value} in this run, "
            f"but {saved} in the checkpoint; {_CHOICE}"
        )
    return saved


def _pairs(optimizer: Any, state: dict[str, Any]) -> Iterator[tuple[Group, Group]]:
    """Yield each group of an optimizer with its group in the checkpoint's state.

    Raises UserError for a checkpoint that divides the parameters into other groups.
    """
    groups = optimizer.optimizer.param_groups
    if (settings := state.get("param_to_group_meta")) is not None:  # Megatron-FSDP
        names = ((group, optimizer._param_name(p)) for group in groups for p in group["params"])
        yield from ((group, settings[name]) for group, name in names if name in settings)
        return
    alike: dict[tuple, tuple[list[Group], list[Group]]] = defaultdict(lambda: ([], []))
    for side, given in enumerate((groups, state.get("optimizer", state)["param_groups"])):
        for group in given:
            # Some versions of Megatron-LM write pre_wd_mult for wd_mult.
            key = tuple(group.get(name, group.get(f"pre_{name}")) for name in _STRUCTURE)
            alike[key][side].append(group)
    for current, saved in (pair for sides in alike.values() for pair in zip_longest(*sides)):
        if current is None or saved is None:
            raise UserError(
                "the checkpoint's optimizer divides the parameters into other groups, as with or "
                "without --decoupled-lr; give the arguments of the run that saved it, or "
                "--no-load-optim"
            )
        yield current, saved


def _reconcile(current: Group, saved: Group) -> None:
    """Give both groups the learning rates that the arguments ask for, or raise UserError."""
    args = get_args()
    for name in _RATES:  # Older versions of Megatron-LM have none in the groups.
        saved.setdefault(name, current.get(name))
    rates, saved_rates = ({name: group.get(name) for name in _RATES} for group in (current, saved))
    if args.override_opt_param_scheduler:
        saved.update(rates)
    elif args.use_checkpoint_opt_param_scheduler:
        current.update(saved_rates)
    elif rates != saved_rates:
        (high, low), (saved_high, saved_low) = rates.values(), saved_rates.values()
        flags = "--lr or --min-lr"
        if not current.get("default_config", True):
            flags = "--decoupled-lr or --decoupled-min-lr"
        raise UserError(
            f"{flags}: the learning rate goes from {high} to {low} in this run, but from "
            f"{saved_high} to {saved_low} in the checkpoint; {_CHOICE}"
        )
    for name, arguments in _RESTORED.items():
        if name in saved and saved[name] != current.get(name):
            say_on_rank_0(
                f"{arguments}: {saved[name]} as in the checkpoint instead of {current.get(name)}; "
                "Megatron-LM restores it with the optimizer"
            )
