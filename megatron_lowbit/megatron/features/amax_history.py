"""Amax histories of delayed scaling: reduction over ranks once per step, and checkpoints.

A layer's histories are of its whole tensors. Every rank with a part or a replica of the layer
has the same histories, which therefore do not depend on the parallel layout.
"""

from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.megatron.layers.state import layer_states, replica_groups
from megatron_lowbit.recipes import Layer

PREFIX = "amax_history."
"""Prefix of the histories' keys in a checkpoint, before the layer's global path."""


class AmaxHistories(Feature):
    """Amax histories of a rank's layers.

    Amaxes recorded in a training step are added to the histories when the next step begins or the
    model is saved, whichever is first. Rerunning a step therefore has no effect. Layers that a
    checkpoint has no history of start with an empty one.
    """

    submodule, prefix = "amax_histories", PREFIX

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._recorded = False

    def check(self, layers: Sequence[Layer]) -> None:
        """Raise UserError if ranks save alone: histories are reduced over all that have a layer."""
        args = self.run.args
        delays = any(precision.history_length for precision in self.run.recipe.precisions())
        experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size
        replicas = args.world_size // (experts * args.pipeline_model_parallel_size)
        # Ranks save that are the first of the data-parallel ones, dense or of experts.
        skips_ranks = min(args.data_parallel_size, replicas) > 1
        require(
            not (delays and args.save and args.ckpt_format == "torch" and skips_ranks),
            "--ckpt-format torch does not support a recipe's amax_history with data parallelism: "
            "not all ranks save; give --ckpt-format torch_dist",
        )

    def check_rank(self) -> None:
        """Raise UserError if an amax history has another length in the checkpoint."""
        source = self.run.source
        for path, history in self._histories(self.run.states).items():
            key, length = PREFIX + path, history.length
            if source and key in source.tensors and (steps := source.tensors[key][1]) != length:
                raise UserError(
                    f"{source.path}: {key} has {steps} steps, but this run's recipe keeps "
                    f"{length}; the larger of amax_history.length and amax_history.just_in_time "
                    f"must be {steps}"
                )

    def begin_step(self, iteration: int, training: bool) -> None:
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
            states = [state for state in self.run.states if state.is_expert == is_expert]
            histories = list(self._histories(states).values())
            if not histories:
                continue
            steps = torch.stack([history.step for history in histories])
            for group in replica_groups(is_expert):
                dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=group)
            for history, step in zip(histories, steps.unbind(), strict=True):
                before = history.entries
                history.advance(step)
                if is_expert:
                    # An expert without tokens on any rank keeps its history.
                    history.entries = torch.where(step[:, None] < 0, before, history.entries)

    def _histories(self, states: Any) -> dict[str, Any]:
        return {
            state.plan.layer.path: state.amax_history
            for state in states
            if state.amax_history is not None
        }

    def extra_tensors(
        self, chunk: torch.nn.Module, saved: Container[str] | None
    ) -> dict[str, Tensor]:
        """Return the histories of a chunk's layers."""
        self._end_step()
        histories = self._histories(layer_states([chunk]))
        return {path: history.entries for path, history in histories.items()}

    def load_extra_tensors(self, chunk: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
        for path, history in self._histories(layer_states([chunk])).items():
            if path in tensors:
                history.entries = tensors[path]
