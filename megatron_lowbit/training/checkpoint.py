"""Checkpoints: Megatron-LM's layout, whole or absent, and exact.

    DIR/latest_checkpointed_iteration.txt    the newest iteration, decimal
    DIR/iter_0000100/lowbit.json             what this project keeps beside the tensors
    DIR/iter_0000100/...                     megatron.core.dist_checkpointing, format torch_dist

A save writes to a hidden directory first, and rank 0 renames it when every rank is done: a killed
or failed save leaves neither a half-made ``iter_`` directory nor a tracker file that names one.
Saving an iteration again replaces it. DIR must be one file system for all ranks.

lowbit.json holds each other file's length and checksum. Loading compares them before training: a
missing, cut or changed file is an error that names it, or leads to the checkpoint before.

Loading runs no code that a checkpoint may hold: lowbit.json is plain JSON, and the pickles among
the files are read as :mod:`megatron_lowbit.training.checkpoint_pickle` says.
"""

import functools
import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_files as files
from megatron_lowbit.training import checkpoint_tensors
from megatron_lowbit.training.checkpoint_files import (
    DOCUMENT,
    TRACKER,
    iteration_directory,
    latest_iteration,
)
from megatron_lowbit.training.checkpoint_ranks import same_outcome
from megatron_lowbit.training.distributed import print_rank0

__all__ = [
    "DOCUMENT", "TRACKER", "Snapshot", "latest_iteration", "load_checkpoint", "save_checkpoint",
    "take_snapshot", "valid_iteration", "write_snapshot",
]  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """What one rank has to write of training after ``iteration`` steps."""

    iteration: int
    tensors: dict[str, Any]
    common: dict[str, Any]
    document: dict[str, Any]


def save_checkpoint(
    directory: str | Path,
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    state: dict[str, Any],
    keep_last: int | None = None,
) -> Path:
    """Save training after ``iteration`` steps to DIR/iter_NNNNNNN and return that path.

    All ranks call it. ``model`` is the list of this rank's model chunks, wrapped or not;
    ``optimizer`` (a megatron optimizer) and ``scheduler`` (OptimizerParamScheduler) may be None.
    ``state`` must be JSON and hold the model's shape under "model": loading compares it.
    ``keep_last`` deletes, once this one is whole, complete older checkpoints beyond that number.

    Raises UserError on all ranks where the checkpoint cannot be written (a full disk, a missing
    permission). DIR then is as it was before.
    """
    snapshot = take_snapshot(directory, iteration, model, optimizer, scheduler, state, copy=False)
    return write_snapshot(directory, snapshot, keep_last)


def take_snapshot(
    directory: str | Path,
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    state: dict[str, Any],
    copy: bool,
) -> Snapshot:
    """The first half of :func:`save_checkpoint`, with its arguments.

    ``copy`` makes the snapshot independent of training, by a copy of it in the CPU's memory.
    """
    document = deepcopy(_document(iteration, optimizer, scheduler, state))
    with same_outcome("write the checkpoint to", Path(directory)):
        tensors, common = checkpoint_tensors.prepare(iteration, model, optimizer, copy)
    return Snapshot(iteration, tensors, common, document)


def write_snapshot(
    directory: str | Path,
    snapshot: Snapshot,
    keep_last: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """The second half of :func:`save_checkpoint`; ``group`` spans all ranks.

    In a thread of its own it needs a group of its own, and a snapshot that is a copy.
    """
    directory = Path(directory)
    final = iteration_directory(directory, snapshot.iteration)
    partial = directory / f".{final.name}.partial"
    together = functools.partial(same_outcome, "write the checkpoint to", directory, group)
    try:
        with together():
            if dist.get_rank() == 0:
                files.make_empty(directory, partial)
        with together():
            checkpoint_tensors.write(partial, snapshot.tensors, snapshot.common, group)
            own = files.checksums(partial, dist.get_rank())
        document = snapshot.document | {"files": _gathered(own, group)}
        with together():
            if dist.get_rank() == 0:
                files.write_document(partial, document)
                files.publish(partial, final)
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if keep_last is not None and dist.get_rank() == 0:
        files.delete_older(directory, snapshot.iteration, keep_last)
    return final


def load_checkpoint(
    directory: str | Path,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    expected_model: dict[str, Any],
    iteration: int | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of DIR in place; return {"iteration": int, "state": dict} of its save.

    All ranks call it; the parallel layout may differ from the save's. ``optimizer`` and
    ``scheduler`` may be None: then only the model is loaded. Parameters, FP32 main parameters and
    Adam's moments come back exactly. ``iteration`` is what :func:`valid_iteration` returned, which
    this calls where it is None.

    Raises UserError where DIR holds no complete checkpoint, or holds one of another model
    (``expected_model`` against the saved state's "model"), optimizer kind, schedule, length of amax
    histories or, with a plain optimizer, precision: all compared before any tensor is read.
    """
    directory = Path(directory)
    if iteration is None:
        iteration = valid_iteration(directory)
    if iteration is None:
        raise UserError(f"{directory}: not a checkpoint directory: it holds no {TRACKER}")
    path = iteration_directory(directory, iteration)
    with same_outcome("read the checkpoint in", directory):
        document = files.read_document(path)
        _check_model(path, document["state"]["model"], expected_model)
        if optimizer is not None:
            _check_optimizer(path, document["optimizer"], checkpoint_tensors.kind(optimizer))
            checkpoint_tensors.check_precision(path, optimizer)
        if scheduler is not None:
            _check_schedule(path, document["scheduler"], scheduler)
        checkpoint_tensors.check_histories(path, model)
    with same_outcome("read the checkpoint in", directory):
        checkpoint_tensors.read(path, model, optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(document["scheduler"])
    return {"iteration": document["iteration"], "state": document["state"]}


def valid_iteration(directory: str | Path, fall_back: bool = False) -> int | None:
    """The iteration to load from DIR: the one its tracker file names, once all files are checked.

    All ranks call it and share the reading. None where DIR holds no tracker file. With
    ``fall_back`` an invalid checkpoint is skipped, which is printed, for the newest valid one
    before it; a tracker file that names no number, or is missing, for the newest valid one.

    Raises UserError that names a missing, cut or changed file where there is no way back.
    """
    directory = Path(directory)
    candidates: list[Any] = [None]
    with same_outcome("read the checkpoint in", directory):
        if dist.get_rank() == 0:
            candidates = [_candidates(directory, fall_back)]
    dist.broadcast_object_list(candidates, src=0)
    skipped: UserError | None = None
    for iteration in candidates[0]:
        path = iteration_directory(directory, iteration)
        try:
            _verify(path)
            return iteration
        except UserError as error:
            if not fall_back:
                others = files.alternatives(directory, besides=iteration)
                raise UserError(f"{error}; {TRACKER} names {path.name} ({others})") from error
            print_rank0(f"--load-latest-valid: skipped {path.name}: {error}")
            skipped = error
    if skipped is not None:
        raise UserError(
            f"{directory}: no valid checkpoint to go back to; the last tried: {skipped}"
        )
    return None


def _candidates(directory: Path, fall_back: bool) -> list[int]:
    """The iterations to try, in this order."""
    newest_first = files.iterations(directory)[::-1]
    try:
        latest = latest_iteration(directory)
    except UserError as error:
        if not (fall_back and newest_first):
            raise
        print_rank0(f"--load-latest-valid: {error}")
        return newest_first
    if not fall_back:
        return [] if latest is None else [latest]
    if latest is None:
        if newest_first:
            print_rank0(f"--load-latest-valid: {directory} holds no {TRACKER}")
        return newest_first
    return [latest, *(number for number in newest_first if number < latest)]


def _verify(path: Path) -> None:
    """Raise UserError on every rank where a file of this checkpoint is not as it was saved."""
    with same_outcome("read the checkpoint in", path.parent):
        recorded = files.read_document(path)["files"]
        by_size = sorted(recorded, key=lambda name: (-recorded[name]["bytes"], name))
        files.check_files(path, recorded, by_size[dist.get_rank() :: dist.get_world_size()])


def _gathered(own: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The union of all ranks' dictionaries."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own, group)
    return {name: value for part in parts for name, value in sorted(part.items())}


def _document(iteration: int, optimizer: Any, scheduler: Any, state: dict) -> dict[str, Any]:
    if "model" not in state:
        raise ValueError('state needs the model\'s shape under "model": loading compares it')
    return {
        "iteration": iteration,
        "optimizer": checkpoint_tensors.kind(optimizer),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "state": state,
    }


def _check_model(path: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    _check_equal(f"{path}: saved from another model", saved, json.loads(json.dumps(expected)))


def _check_optimizer(path: Path, saved: str | None, current: str | None) -> None:
    if saved is None:
        raise UserError(f"{path}: holds a model without optimizer: --finetune begins with it")
    if saved != current:
        raise UserError(
            f"{path}: saved with optimizer {saved}, but this run's is {current}; "
            "--use-distributed-optimizer must be as it was"
        )


def _check_schedule(path: Path, saved: dict[str, Any] | None, scheduler: Any) -> None:
    if saved is None:
        raise UserError(f"{path}: saved without a learning-rate schedule; load it without one")
    if scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler:
        return
    current = json.loads(json.dumps(scheduler.state_dict()))
    _check_equal(
        f"{path}: saved with another schedule (--override-opt-param-scheduler takes the new one)",
        {**saved, "num_steps": None},
        {**current, "num_steps": None},
    )


def _check_equal(message: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise UserError that names each key whose values differ, with both."""
    differences = [
        f"{key} was {_shown(saved, key)}, now {_shown(current, key)}"
        for key in sorted(saved.keys() | current.keys())
        if _shown(saved, key) != _shown(current, key)
    ]
    if differences:
        raise UserError(f"{message}: {'; '.join(differences)}")


def _shown(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"
