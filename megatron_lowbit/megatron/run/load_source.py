"""Checkpoint that a run loads: its choice, its verification, and its metadata.

The model's hooks need these before Megatron-LM loads the checkpoint.
"""

import io
import os
import pickle
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.safe_globals import SafeUnpickler

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.megatron.run.common_state import saved_args
from megatron_lowbit.megatron.run.errors import raise_on_all_ranks, say_on_rank_0
from megatron_lowbit.recipes.te_config import FACTORIES
from megatron_lowbit.storage import files
from megatron_lowbit.storage.pickles import load_restricted, read_objects, saved_tensors
from megatron_lowbit.storage.selection import Selected, load_directory, newest, persistent, selected

_READING = "read the checkpoint in"
_EXTRA_STATE = "_extra_state"
_KNOWN = SafeUnpickler._SAFE_CLASSES | {
    # In checkpoints of older versions, where a layer computes in a Transformer Engine recipe that
    # megatron-core has no name for. Transformer Engine ignores them.
    ("transformer_engine.common.recipe", "CustomRecipe"),
    ("megatron_lowbit.megatron.transformer_engine_layers", "factory"),
}
_Candidate = tuple[int | None, Selected]
"""Value of ``--ckpt-step``, None for a release, and the checkpoint that Megatron-LM then loads."""


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
        directory = load_directory(args)
        source = selected(args, directory)
        if source is None:
            return None
        # Megatron-LM begins with the first iteration from --pretrained-checkpoint, too.
        resumed = not args.finetune and args.load is not None and directory == Path(args.load)
        iteration = (source.iteration or 0) if resumed else 0
        return cls(source.path, iteration, saved_tensors(source.path))

    def samples(self) -> int:
        """Read the samples consumed until ``iteration``; 0 if the checkpoint does not have them."""
        stored = saved_args(self.path) if self.iteration else None
        return getattr(stored, "consumed_train_samples", 0)


def check_starts_anew(args: Namespace) -> None:
    """Raise UserError where no checkpoint is in the folder to load, unless a restart will find one.

    Megatron-LM would train, or evaluate, random weights.
    """
    directory = load_directory(args)
    if directory is None or selected(args, directory) is not None:
        return
    flag = "--load" if args.pretrained_checkpoint is None else "--pretrained-checkpoint"
    require(
        _is_saved_to(args, directory) and not (args.finetune or args.skip_train),
        f"{flag} {directory}: holds no checkpoint; omit it to train new weights. Only a folder "
        "that is --save, too, may be empty, without --finetune and --skip-train",
    )


def _is_saved_to(args: Namespace, directory: Path) -> bool:
    return args.save is not None and directory.resolve() == Path(args.save).resolve()


def choose_checkpoint(args: Namespace) -> int | None:
    """Choose the checkpoint to load and verify it; all ranks together.

    With ``--load-latest-valid``, invalid checkpoints are skipped with a printed line, and the
    newest valid one is selected by ``args.ckpt_step``. Returns the iteration that Megatron-LM will
    load; None for a release or without a checkpoint. Raises UserError for an invalid one, or if
    none is valid.
    """
    directory = load_directory(args)
    if directory is None:
        return None
    skipped: UserError | None = None
    for step, (path, iteration) in _candidates(args, directory):
        try:
            verify_checkpoint(path)
        except UserError as error:
            if not args.load_latest_valid or step is None or path.parent != directory:
                raise UserError(f"{error}{_advice(directory, step, path)}") from error
            say_on_rank_0(f"--load-latest-valid: skipped {path.name}: {error}")
            skipped = error
            continue
        if args.load_latest_valid and step is not None:
            args.ckpt_step = step  # Megatron-LM's argument for a given iteration
        return iteration
    if skipped is not None:
        raise UserError(f"{directory}: no valid checkpoint; the last one tried: {skipped}")
    return None


def _advice(directory: Path, step: int | None, path: Path) -> str:
    """Return the part of an error message that says how to go on without a checkpoint."""
    if path.parent != directory:
        return " (without --non-persistent-ckpt-type, the run loads the persistent checkpoint)"
    if step is None:
        return ""
    others = files.alternatives(directory, besides=step)
    if files.replaced_directory(path).exists():
        others += f"; a start with --save {directory} restores what a killed run set aside"
    return f" ({others})"


def _candidates(args: Namespace, directory: Path) -> list[_Candidate]:
    """Return the checkpoints to try in order, as rank 0 reads them from the folder."""
    candidates: list[list[_Candidate]] = [[]]
    with raise_on_all_ranks(_READING, directory):
        if dist.get_rank() == 0:
            candidates = [_candidates_on_disk(args, directory)]
    dist.broadcast_object_list(candidates, src=0)
    return candidates[0]


def _candidates_on_disk(args: Namespace, directory: Path) -> list[_Candidate]:
    # A run that only reads a folder without a tracker file leaves it as it is.
    if os.path.lexists(directory / files.TRACKER) or (
        not args.ckpt_step and _is_saved_to(args, directory)
    ):
        files.restore_tracker(directory)
    first = None
    try:
        first = persistent(args, directory)
    except UserError as error:
        last = files.last_saved(directory)
        if not args.load_latest_valid or args.ckpt_step or last is None:
            raise
        say_on_rank_0(f"--load-latest-valid: {error}")
        # Megatron-LM reads the file all the same, and exits with code 0 if it is damaged.
        files.write_tracker(directory, last)
    saved = [] if first is None else [first]
    is_release = first is not None and first.iteration is None
    if args.load_latest_valid and not args.ckpt_step and not is_release:
        latest = first and first.iteration
        saved += [
            Selected(files.iteration_directory(directory, number), number)
            for number in reversed(files.iterations(directory))
            if latest is None or number < latest
        ]
    loaded = [(each.iteration, newest(args, directory, each)) for each in saved]
    loaded = loaded or [(None, newest(args, directory, None))]
    return [(step, checkpoint) for step, checkpoint in loaded if checkpoint is not None]


def verify_checkpoint(path: Path) -> None:
    """Raise UserError on all ranks if a checkpoint differs from what was saved.

    Each rank reads a share of the files.
    """
    with raise_on_all_ranks(_READING, path.parent):
        recorded = files.recorded_files(path)
        if recorded is None:
            say_on_rank_0(f"{path}: no {files.DOCUMENT}: loaded without comparing checksums")
        else:
            by_size = sorted(recorded, key=lambda name: (-recorded[name]["bytes"], name))
            files.check_files(path, recorded, by_size[dist.get_rank() :: dist.get_world_size()])
    with raise_on_all_ranks(_READING, path.parent):
        if dist.get_rank() == 0:
            for file, key, content in read_objects(path):
                check_extra_states(file, key, content)


class _Inert(dict[Any, Any]):
    """Stands for any class of an extra state, and does nothing with what it is given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _NamesOnly(pickle.Unpickler):
    """Unpickler that finds the names that an extra state may hold, and calls none."""

    def find_class(self, module: str, name: str) -> Any:
        # Transformer Engine pickles factories by name into checkpoints, and ignores them.
        if (module, name) not in _KNOWN and module != FACTORIES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _Inert


def check_extra_states(file: Path, key: str, content: Any) -> None:
    """Raise UserError where an extra state of a layer could run code.

    Extra states are pickles in tensors of bytes, which older versions of Transformer Engine
    unpickle without any restriction. ``content`` is the loaded object of a ``key``; dictionaries in
    it may hold extra states under keys of their own. ``file`` is the checkpoint's, for errors.
    """
    for state in _extra_states(key, content):
        if isinstance(state, io.BytesIO):  # written before Transformer Engine 2.0
            load_restricted(file, state)
            state.seek(0)
        else:
            try:
                _NamesOnly(io.BytesIO(state.numpy().tobytes())).load()
            except Exception as error:  # a damaged pickle raises almost anything
                raise UserError(
                    f"{file}: {key}: refused: damaged, or an extra state that could run code "
                    f"({error})"
                ) from None


def _extra_states(key: str, content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _extra_states(f"{key}.{name}", value)
    elif _EXTRA_STATE in key:
        for value in content if isinstance(content, list | tuple) else (content,):
            # Transformer Engine takes the bytes of tensors of any dtype.
            is_tensor = isinstance(value, torch.Tensor) and value.numel() > 0
            if is_tensor or isinstance(value, io.BytesIO):
                yield value
