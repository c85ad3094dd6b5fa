"""Selection of the checkpoint that Megatron-LM loads, from its arguments alone.

It follows ``load_checkpoint`` and ``load_args_from_checkpoint`` of Megatron-LM, so that a
checkpoint is verified before any of its bytes are read.
"""

from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from megatron_lowbit.errors import require
from megatron_lowbit.storage import files


class Selected(NamedTuple):
    """Folder of a checkpoint, and its iteration: None for a release."""

    path: Path
    iteration: int | None


def load_directory(args: Namespace) -> Path | None:
    """Return ``--load``, or ``--pretrained-checkpoint`` if ``--load`` has no tracker file."""
    if args.pretrained_checkpoint is None:
        return args.load and Path(args.load)
    if args.load is not None and (Path(args.load) / files.TRACKER).is_file():
        return Path(args.load)
    return Path(args.pretrained_checkpoint)


def persistent(args: Namespace, directory: Path) -> Selected | None:
    """Return the checkpoint that ``--ckpt-step`` or the tracker file of a directory names.

    Raises:
        UserError: the tracker file is damaged, or contradicts ``--ckpt-step``.
    """
    release = files.release(directory)
    if release is not None:
        require(
            not args.ckpt_step,
            f"--ckpt-step {args.ckpt_step}: Megatron-LM loads {release} all the same, which "
            f"{files.TRACKER} names; write {args.ckpt_step} into that file instead",
        )
        return Selected(release, None)
    latest = files.latest_iteration(directory)
    iteration = args.ckpt_step or latest
    if iteration is None:
        return None
    return Selected(files.iteration_directory(directory, iteration), iteration)


def newest(args: Namespace, directory: Path, saved: Selected | None) -> Selected | None:
    """Return the non-persistent checkpoint of a directory unless ``saved`` is of a later iteration.

    Raises:
        UserError: the tracker file of the non-persistent checkpoints is damaged.
    """
    if args.non_persistent_ckpt_type != "global":
        return saved
    folder = Path(args.non_persistent_global_ckpt_dir or directory / "non_persistent")
    iteration = files.latest_iteration(folder)
    if iteration is None or (saved is not None and iteration < (saved.iteration or 0)):
        return saved
    return Selected(files.iteration_directory(folder, iteration), iteration)


def selected(args: Namespace, directory: Path | None) -> Selected | None:
    """Return the checkpoint that Megatron-LM loads from a directory; None if it holds none."""
    if directory is None:
        return None
    return newest(args, directory, persistent(args, directory))
