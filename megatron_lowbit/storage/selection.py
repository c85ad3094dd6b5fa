"""Selection of the checkpoint in a directory that a run loads.

It follows ``load_checkpoint`` and ``load_args_from_checkpoint`` of Megatron-LM.
"""

from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from megatron_lowbit.errors import require
from megatron_lowbit.storage.files import TRACKER, iteration_directory, latest_iteration, release


class Selected(NamedTuple):
    """Folder of a checkpoint, and its iteration: None for a release."""

    path: Path
    iteration: int | None


def load_directory(args: Namespace) -> Path | None:
    """Return ``--load``, or ``--pretrained-checkpoint`` if ``--load`` has no tracker file."""
    has_load = args.load is not None and (Path(args.load) / TRACKER).is_file()
    directory = args.load if has_load else args.pretrained_checkpoint or args.load
    return directory and Path(directory)


def persistent(args: Namespace, directory: Path) -> Selected | None:
    """Return the checkpoint that ``--ckpt-step`` or the tracker file of a directory names.

    Raises UserError if the tracker file is damaged, or contradicts ``--ckpt-step``.
    """
    if (folder := release(directory)) is not None:
        require(
            not args.ckpt_step,
            f"--ckpt-step {args.ckpt_step}: Megatron-LM loads {folder} all the same, which "
            f"{TRACKER} names; write {args.ckpt_step} into that file instead",
        )
        return Selected(folder, None)
    latest = latest_iteration(directory)
    iteration = args.ckpt_step or latest
    if iteration is None:
        return None
    return Selected(iteration_directory(directory, iteration), iteration)


def newest(args: Namespace, directory: Path, saved: Selected | None) -> Selected | None:
    """Return the non-persistent checkpoint of a directory unless ``saved`` is of a later iteration.

    Raises UserError if the tracker file of the non-persistent checkpoints is damaged.
    """
    if args.non_persistent_ckpt_type != "global":
        return saved
    folder = Path(args.non_persistent_global_ckpt_dir or directory / "non_persistent")
    iteration = latest_iteration(folder)
    if iteration is None or (saved is not None and iteration < (saved.iteration or 0)):
        return saved
    return Selected(iteration_directory(folder, iteration), iteration)


def selected(args: Namespace, directory: Path | None) -> Selected | None:
    """Return the checkpoint that Megatron-LM loads from a directory; None if it holds none."""
    if directory is None:
        return None
    return newest(args, directory, persistent(args, directory))
