"""The state of delayed scaling over a model: reduced once a step, and kept in checkpoints.

A layer's histories are those of its whole tensors: the same on every rank that holds a part of the
layer or a replica of it, so that they fit any layout.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_lowbit.integrations.megatron_core.linear import lowbit_linears

PREFIX = "amax_history."


def end_step(chunks: Iterable[torch.nn.Module]) -> None:
    """Move the present step's amaxes, the largest over all ranks, into the histories.

    Collective over the ranks of a pipeline stage.
    """
    histories = [m.amax_history for m in lowbit_linears(chunks) if m.amax_history is not None]
    if not histories:
        return
    steps = torch.stack([history.step for history in histories])
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=group)
    for history, step in zip(histories, steps.unbind(), strict=True):
        history.advance(step)


def sharded_state(chunks: Iterable[torch.nn.Module]) -> dict[str, ShardedTensor]:
    """The histories by checkpoint key: ``amax_history.`` and the layer's global path."""
    replica = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return {
        key: ShardedTensor.from_rank_offsets(key, entries, replica_id=replica)
        for key, entries in _entries(chunks).items()
    }


def load_state(chunks: Iterable[torch.nn.Module], state: dict[str, torch.Tensor]) -> None:
    """Take loaded histories; a layer that the checkpoint has none for starts anew."""
    for module in lowbit_linears(chunks):
        loaded = state.get(PREFIX + module.plan.layer.path)
        if loaded is not None:
            module.amax_history.entries = loaded


def _entries(chunks: Iterable[torch.nn.Module]) -> dict[str, Any]:
    return {
        PREFIX + module.plan.layer.path: module.amax_history.entries
        for module in lowbit_linears(chunks)
        if module.amax_history is not None
    }
