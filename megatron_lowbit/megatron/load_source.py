"""Checkpoint that a run loads: its choice, its verification, and its metadata.

The model's hooks need these before Megatron-LM loads the checkpoint.
"""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.amax_history import PREFIX
from megatron_lowbit.megatron.layer_state import LayerState
from megatron_lowbit.megatron.printing import say_on_rank_0
from megatron_lowbit.megatron.same_outcome import same_outcome
from megatron_lowbit.storage import files, replacement
from megatron_lowbit.storage.pickles import check_lengths, check_objects, saved_tensors

_READING = "read the checkpoint in"


@dataclass(frozen=True)
class LoadSource:
    """Checkpoint that a run loads.

    Attributes:
        path: folder of the checkpoint.
        iteration: iteration from which training resumes; 0 with ``--finetune``.
        tensors: shapes of the tensors by key.
    """

    path: Path
    iteration: int
    tensors: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, args: Namespace) -> "LoadSource | None":
        """Return the checkpoint that the arguments select; None for new weights."""
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
        """Raise UserError if an amax history has another length in the checkpoint."""
        for state in states:
            if state.amax_history is None:
                continue
            key, length = PREFIX + state.plan.layer.path, state.amax_history.length
            if key in self.tensors and (steps := self.tensors[key][1]) != length:
                raise UserError(
                    f"{self.path}: {key} has {steps} steps, but this run's recipe keeps {length}; "
                    "the larger of amax_history.length and amax_history.just_in_time must be "
                    f"{steps}"
                )


def choose_checkpoint(args: Namespace) -> int | None:
    """Choose the checkpoint to load and verify it; all ranks together.

    With ``--load-latest-valid``, invalid checkpoints are skipped with a printed line, and the
    newest valid one is selected by ``args.ckpt_step``.

    Returns:
        The iteration that Megatron-LM will load; None for a release or without a checkpoint.

    Raises:
        UserError: the checkpoint is invalid, or none is valid.
    """
    directory = Path(args.load)
    release = None if args.ckpt_step else files.release(directory)
    if release is not None:
        verify_checkpoint(release)
        return None
    skipped: UserError | None = None
    for iteration in _candidates(args, directory):
        path = files.iteration_directory(directory, iteration)
        try:
            verify_checkpoint(path)
        except UserError as error:
            if not args.load_latest_valid:
                others = files.alternatives(directory, besides=iteration)
                if replacement.replaced_directory(path).exists():
                    others += (
                        f"; a start with --save {directory} restores what a killed run set aside"
                    )
                raise UserError(f"{error} ({others})") from error
            say_on_rank_0(f"--load-latest-valid: skipped {path.name}: {error}")
            skipped = error
            continue
        if args.load_latest_valid:
            args.ckpt_step = iteration  # Megatron-LM's argument for a given iteration
        return iteration
    if skipped is not None:
        raise UserError(f"{directory}: no valid checkpoint; the last one tried: {skipped}")
    return None


def _candidates(args: Namespace, directory: Path) -> list[int]:
    """Return the iterations to try in order, as rank 0 reads them from the folder."""
    candidates: list[list[int]] = [[]]
    with same_outcome(_READING, directory):
        if dist.get_rank() == 0:
            candidates = [_candidates_on_disk(args, directory)]
    dist.broadcast_object_list(candidates, src=0)
    return candidates[0]


def _candidates_on_disk(args: Namespace, directory: Path) -> list[int]:
    if args.ckpt_step:
        return [args.ckpt_step]
    _mend_empty_tracker(directory)
    latest = None
    try:
        latest = files.latest_iteration(directory)
    except UserError as error:
        if not args.load_latest_valid:
            raise
        say_on_rank_0(f"--load-latest-valid: {error}")
    newest = [] if latest is None else [latest]
    if not args.load_latest_valid:
        return newest
    older = [number for number in files.iterations(directory) if latest is None or number < latest]
    return newest + older[::-1]


def _mend_empty_tracker(directory: Path) -> None:
    """Write the last complete iteration to a tracker file that a killed save left empty.

    Megatron-LM truncates the file before it writes the new iteration.
    """
    tracker = directory / files.TRACKER
    if not tracker.is_file() or tracker.read_text(errors="replace").strip():
        return
    last = files.last_saved(directory)
    if last is not None:
        files.write_tracker(directory, last)
        say_on_rank_0(f"{tracker}: empty after a killed save; restored to {last}")


def verify_checkpoint(path: Path) -> None:
    """Raise UserError on all ranks if a checkpoint differs from what was saved.

    Each rank reads a share of the files.
    """
    with same_outcome(_READING, path.parent):
        if (path / files.DOCUMENT).exists():
            recorded = files.read_document(path)["files"]
            by_size = sorted(recorded, key=lambda name: (-recorded[name]["bytes"], name))
            files.check_files(path, recorded, by_size[dist.get_rank() :: dist.get_world_size()])
        elif not path.is_dir():
            raise UserError(f"{path}: missing")
        elif dist.get_rank() == 0:
            check_lengths(path)
            say_on_rank_0(f"{path}: no {files.DOCUMENT}: loaded without comparing checksums")
    with same_outcome(_READING, path.parent):
        if dist.get_rank() == 0:
            check_objects(path)
