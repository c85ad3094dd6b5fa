"""Plan of one run as its arguments give it, for ``--dry-run``."""

from argparse import Namespace
from collections.abc import Iterator

import torch
from rich.table import Table

from megatron_lowbit.errors import UserError
from megatron_lowbit.planning import report
from megatron_lowbit.planning.communication import Cluster
from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.hardware import GPU, gpu, kinds
from megatron_lowbit.planning.layouts import candidate_of
from megatron_lowbit.planning.memory import usable_bytes
from megatron_lowbit.planning.model import check_plannable
from megatron_lowbit.planning.search import plan
from megatron_lowbit.recipes import load_recipes

_ASSUMED = "h200"
_GPUS_PER_NODE = 8


def describe_plan(args: Namespace) -> Iterator[str | Table]:
    """Yield tables of the memory and time of a run, or the reason why there are none.

    Args:
        args: training's validated arguments, with ``padded_vocab_size``.
    """
    kind, where = _gpu()
    try:
        check_plannable(args)
        candidate = candidate_of(Namespace(**vars(args)), args.world_size)
    except UserError as error:
        yield f"memory and time are not planned: {error}"
        return
    # Layers are local on a machine without GPUs for want of another choice.
    through_te = args.transformer_impl == "transformer_engine" or not torch.cuda.is_available()
    if through_te:
        candidate.args.transformer_impl = "transformer_engine"
    device = Device(kind, through_te, "mamba-ssm")
    recipe = load_recipes(args.precision_recipe or ["bf16"], args.recipe_set)
    cluster = Cluster(kind, min(_GPUS_PER_NODE, args.world_size))
    (found,) = plan([candidate], recipe, args.padded_vocab_size, device, cluster)
    layers = "Transformer Engine's layers" if through_te else "local layers"
    yield f"planned for {args.world_size} x {kind.name} ({where}), {layers}, BF16"
    yield report.memory_table(found, usable_bytes(device))
    samples = args.train_samples or (args.train_iters or 0) * args.global_batch_size
    yield report.time_table(found, device, samples * args.seq_length or None)


def _gpu() -> tuple[GPU, str]:
    """Return the GPU to plan for and why: this machine's, or an assumed one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for kind in kinds():
        if kind.upper() in name:
            return gpu(kind), "this machine's"
    return gpu(_ASSUMED), "assumed; this machine has none that plans know"
