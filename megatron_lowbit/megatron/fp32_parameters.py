"""megatron-core's optimizers for a BF16 model with FP32 parameters, such as a mixer's ``A_log``.

Steps of both optimizers are right; what they save and load is not, as each takes parameters for
one another where a group holds both dtypes. Without FP32 parameters all this changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def number_as_stored(part: Any) -> None:
    """Let a distributed optimizer find a parameter's state where its group has it: FP32 first."""
    if not isinstance(part, DistributedOptimizer):
        return
    groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
    for number, (fp32, float16) in enumerate(groups):
        for order, parameter in enumerate(chain(fp32, float16)):
            part.model_param_group_index_map[parameter] = (number, order)


@contextmanager
def fp32_as_main(part: Any) -> Iterator[None]:
    """Let a plain optimizer, while it saves or loads, take FP32 parameters for their own main ones.

    It numbers the parameters that it describes by counting BF16 ones alone.
    """
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        yield
        return
    own = part.float16_groups, part.fp32_from_float16_groups
    models, mains = (list(chain.from_iterable(groups)) for groups in own)
    model_of = dict(zip(mains, models, strict=True))
    part.fp32_from_float16_groups = [group["params"] for group in part.optimizer.param_groups]
    part.float16_groups = [
        [model_of.get(main, main) for main in group] for group in part.fp32_from_float16_groups
    ]
    try:
        yield
    finally:
        part.float16_groups, part.fp32_from_float16_groups = own
