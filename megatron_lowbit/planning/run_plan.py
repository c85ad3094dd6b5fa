"""Plan of one run for ``--dry-run``: the tables and notes of ``lowbit-plan --as-given``."""

from collections.abc import Iterator, Sequence

import torch
from rich.table import Table

from megatron_lowbit.errors import UserError
from megatron_lowbit.planning import report
from megatron_lowbit.planning.command import read_arguments
from megatron_lowbit.planning.hardware import gpu, kinds
from megatron_lowbit.planning.memory import usable_bytes
from megatron_lowbit.planning.search import plan_run

_ASSUMED = "h200"


def planned_gpu(kind: str | None) -> tuple[str, str]:
    """Return the kind of GPU to plan for, and why: it is given, this machine's, or assumed.

    Args:
        kind: as ``--gpu`` names it; None if it is not given.

    Raises:
        UserError: there are no figures of that kind.
    """
    if kind is not None:
        gpu(kind)
        return kind, "as --gpu asks"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for known in kinds():
        if known.upper() in name:
            return known, "this machine's"
    return _ASSUMED, "assumed, --gpu names another"


def describe_plan(training: Sequence[str], gpus: int, kind: str, why: str) -> Iterator[str | Table]:
    """Yield tables of the memory and time of a run, or the reason why there are none.

    Args:
        training: arguments of the run, as given.
        gpus: all of them.
        kind, why: as :func:`planned_gpu` returns them.
    """
    own, _ = read_arguments(["--gpu", kind, "--gpus", str(gpus), "--as-given"])
    try:
        plan = plan_run(own, training)
    except UserError as error:
        yield f"memory and time are not planned: {error}"
        return
    device, (found,) = plan.device, plan.found
    layers = "Transformer Engine's layers" if device.transformer_engine else "local layers"
    yield f"planned for {gpus} x {device.gpu.name} ({why}), {layers}, BF16"
    yield report.memory_table(found, usable_bytes(device))
    yield report.time_table(found, device, plan.tokens)
    yield from report.routing_notes(plan.parts, plan.recipe, device)
