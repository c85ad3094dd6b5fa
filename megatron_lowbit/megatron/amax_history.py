"""Amax histories of delayed scaling: reduction over ranks once a step, and checkpoints.

A layer's histories are those of its whole tensors. Every rank with a part or a replica of the layer
has the same histories, which therefore do not depend on the parallel layout.
"""

from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_lowbit.megatron import experts
from megatron_lowbit.megatron.layer_state import LayerState

PREFIX = "amax_history."
"""Prefix of the histories' keys in a checkpoint, before the layer's global path."""


class AmaxHistories(torch.nn.Module):
    """Amax histories of a chunk's layers, as a submodule that the chunk's checkpoints include.

    Amaxes recorded in a training step are added to the histories when the next step begins or the
    model is saved, whichever is first. Rerunning a step therefore has no effect.

    Args:
        states: states of the chunk's layers.
        saved: keys of the tensors in the checkpoint to load, or None without a checkpoint. Layers
            without a key start with an empty history.
    """

    def __init__(self, states: Sequence[LayerState], saved: Container[str] | None) -> None:
        super().__init__()
        self._states = tuple(states)
        self._saved = saved
        self._recorded = False

    def begin_step(self, iteration: int, training: bool) -> None:
        """Complete the previous step, before the first forward pass of every step."""
        self._end_step()
        self._recorded = training

    def _end_step(self) -> None:
        """Add the recorded amaxes to the histories, reduced by maximum over all ranks.

        All ranks of a pipeline stage must call this together.
        """
        if not self._recorded:
            return
        self._recorded = False
        for is_expert in (False, True):
            histories = [s.amax_history for s in self._with_history() if s.is_expert == is_expert]
            if not histories:
                continue
            steps = torch.stack([history.step for history in histories])
            for group in experts.replica_groups(is_expert):
                dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=group)
            for history, step in zip(histories, steps.unbind(), strict=True):
                before = history.entries
                history.advance(step)
                if is_expert:
                    # An expert without tokens on any rank keeps its history.
                    history.entries = torch.where(step[:, None] < 0, before, history.entries)

    def _with_history(self) -> list[LayerState]:
        return [state for state in self._states if state.amax_history is not None]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the histories by path: all of them to save, those in the checkpoint to load."""
        self._end_step()
        sharded = {}
        for state in self._with_history():
            path = state.plan.layer.path
            if self._saved is None or PREFIX + path in self._saved:
                sharded[prefix + path] = ShardedTensor.from_rank_offsets(
                    PREFIX + path,
                    state.amax_history.entries,
                    replica_id=experts.replica_id(state.is_expert),
                )
        return sharded

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        self._end_step()
        for state in self._with_history():
            destination[prefix + state.plan.layer.path] = state.amax_history.entries

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *_: Any, **__: Any) -> None:
        for state in self._with_history():
            entries = state_dict.get(prefix + state.plan.layer.path)
            if entries is not None:
                state.amax_history.entries = entries
        self._saved = None  # Later checkpoints hold all histories.
