"""The state of delayed scaling over a model: reduced once a step, and kept in checkpoints.

A layer's histories are those of its whole tensors: the same on every rank that holds a part of the
layer or a replica of it, so that they fit any layout.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_lowbit.megatron import experts
from megatron_lowbit.megatron.layer_state import layer_states

PREFIX = "amax_history."


def end_step(chunks: Iterable[torch.nn.Module]) -> None:
    """Move the present step's amaxes, the largest over all ranks, into the histories.

    Collective over the ranks of a pipeline stage.
    """
    states = [state for state in layer_states(chunks) if state.amax_history is not None]
    for is_expert in (False, True):
        histories = [s.amax_history for s in states if s.is_expert == is_expert]
        if not histories:
            continue
        steps = torch.stack([history.step for history in histories])
        for group in experts.replica_groups(is_expert):
            dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=group)
        for history, step in zip(histories, steps.unbind(), strict=True):
            before = history.entries
            history.advance(step)
            if is_expert:
                # One that had no tokens on any rank keeps what it knows.
                history.entries = torch.where(step[:, None] < 0, before, history.entries)


def sharded_state(chunks: Iterable[torch.nn.Module]) -> dict[str, ShardedTensor]:
    """The histories by checkpoint key: ``amax_history.`` and the layer's global path."""
    found = {}
    for state in layer_states(chunks):
        if state.amax_history is not None:
            key = PREFIX + state.plan.layer.path
            found[key] = ShardedTensor.from_rank_offsets(
                key, state.amax_history.entries, replica_id=experts.replica_id(state.is_expert)
            )
    return found


def load_state(chunks: Iterable[torch.nn.Module], histories: dict[str, torch.Tensor]) -> None:
    """Take loaded histories; a layer that the checkpoint has none for starts anew."""
    for state in layer_states(chunks):
        loaded = histories.get(PREFIX + state.plan.layer.path)
        if loaded is not None:
            state.amax_history.entries = loaded
