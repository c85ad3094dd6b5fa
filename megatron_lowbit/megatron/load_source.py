"""The checkpoint that a run goes on from, known before the model is built."""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_lowbit.checkpoints import files
from megatron_lowbit.checkpoints.pickles import saved_tensors
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.amax_history import PREFIX
from megatron_lowbit.megatron.layer_state import LayerState


@dataclass(frozen=True)
class LoadSource:
    """A checkpoint: its folder, its iteration, and the shapes of its tensors by their keys.

    ``iteration`` is the one that training goes on from: 0 under ``--finetune``.
    """

    path: Path
    iteration: int
    tensors: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, args: Namespace) -> "LoadSource | None":
        """Return what the arguments load; None where training begins anew."""
        if args.load is None:
            return None
        release = files.release(args.load)
        if release is not None and not args.ckpt_step:
            return cls(release, 0, saved_tensors(release))
        iteration = args.ckpt_step or files.latest_iteration(args.load)
        if iteration is None:
            return None
        path = files.iteration_directory(Path(args.load), iteration)
        return cls(path, 0 if args.finetune else iteration, saved_tensors(path))

    def check_histories(self, states: Iterable[LayerState]) -> None:
        """Raise UserError where an amax history has another length in the checkpoint."""
        for state in states:
            if state.amax_history is None:
                continue
            key, kept = PREFIX + state.plan.layer.path, state.amax_history.length
            if key in self.tensors and (steps := self.tensors[key][1]) != kept:
                raise UserError(
                    f"{self.path}: {key} has {steps} steps, but this run's recipe keeps {kept}; "
                    "the larger of amax_history.length and amax_history.just_in_time must be "
                    f"{steps}"
                )
