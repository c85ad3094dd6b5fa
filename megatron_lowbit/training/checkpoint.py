"""Checkpoints: Megatron-LM's layout, whole or absent, and exact.

    DIR/latest_checkpointed_iteration.txt    the newest iteration, decimal
    DIR/iter_0000100/lowbit.json             what this project keeps beside the tensors
    DIR/iter_0000100/...                     megatron.core.dist_checkpointing, format torch_dist

A save writes to a hidden directory first, and rank 0 renames it when every rank is done: a killed
or failed save leaves neither a half-made ``iter_`` directory nor a tracker file that names one.
Saving an iteration again replaces it. DIR must be one file system for all ranks.

Load only checkpoints you trust: megatron.core and torch unpickle ``.metadata`` and, where a
checkpoint holds Python objects besides tensors, those objects. lowbit.json is plain JSON and
common.pt is read with torch's weights_only.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_tensors

TRACKER = "latest_checkpointed_iteration.txt"
DOCUMENT = "lowbit.json"
FORMAT_VERSION = 1


def save_checkpoint(
    directory: str | Path,
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    state: dict[str, Any],
) -> Path:
    """Save training after ``iteration`` steps to DIR/iter_NNNNNNN and return that path.

    All ranks call it. ``model`` is the list of this rank's model chunks, wrapped or not;
    ``optimizer`` (a megatron optimizer) and ``scheduler`` (OptimizerParamScheduler) may be None.
    ``state`` must be JSON and hold the model's shape under "model": loading compares it.

    Raises UserError on all ranks where the checkpoint cannot be written (a full disk, a missing
    permission). DIR then is as it was before.
    """
    directory = Path(directory)
    final = _iteration_directory(directory, iteration)
    partial = directory / f".{final.name}.partial"
    document = _document(iteration, optimizer, scheduler, state)
    try:
        with _same_outcome("write the checkpoint to", directory):
            if dist.get_rank() == 0:
                _make_empty(directory, partial)
            sharded, common = checkpoint_tensors.prepare(iteration, model, optimizer)
        with _same_outcome("write the checkpoint to", directory):
            checkpoint_tensors.write(partial, sharded, common)
        with _same_outcome("write the checkpoint to", directory):
            if dist.get_rank() == 0:
                _write_text(partial / DOCUMENT, json.dumps(document, indent=1))
                _publish(partial, final)
                _replace_text(directory / TRACKER, str(iteration))
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load_checkpoint(
    directory: str | Path,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    expected_model: dict[str, Any],
) -> dict[str, Any]:
    """Load DIR's newest checkpoint in place; return {"iteration": int, "state": dict} of its save.

    All ranks call it; the parallel layout may differ from the save's. ``optimizer`` and
    ``scheduler`` may be None: then only the model is loaded. Parameters, FP32 main parameters and
    Adam's moments come back exactly.

    Raises UserError where DIR holds no complete checkpoint, or holds one of another model
    (``expected_model`` against the saved state's "model"), optimizer kind, schedule or length of
    amax histories: all compared before any tensor is read.
    """
    directory = Path(directory)
    with _same_outcome("read the checkpoint in", directory):
        path = _newest(directory)
        document = _read_document(path)
        _check_model(path, document["state"]["model"], expected_model)
        if optimizer is not None:
            _check_optimizer(path, document["optimizer"], checkpoint_tensors.kind(optimizer))
        if scheduler is not None:
            _check_schedule(path, document["scheduler"], scheduler)
        checkpoint_tensors.check_histories(path, model)
    with _same_outcome("read the checkpoint in", directory):
        checkpoint_tensors.read(path, model, optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(document["scheduler"])
    return {"iteration": document["iteration"], "state": document["state"]}


def latest_iteration(directory: str | Path) -> int | None:
    """The iteration that DIR's tracker file names; None where there is no tracker file.

    Raises UserError where the file holds anything but a decimal number.
    """
    tracker = Path(directory) / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise UserError(
            f"{tracker}: {text[:40]!r} is not an iteration; write the number of a complete "
            f"checkpoint into it ({_present(tracker.parent)})"
        )
    return int(text)


def _iteration_directory(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def _document(iteration: int, optimizer: Any, scheduler: Any, state: dict) -> dict[str, Any]:
    if "model" not in state:
        raise ValueError('state needs the model\'s shape under "model": loading compares it')
    return {
        "format_version": FORMAT_VERSION,
        "iteration": iteration,
        "optimizer": checkpoint_tensors.kind(optimizer),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "state": state,
    }


# -- writing ---------------------------------------------------------------------------------------


def _make_empty(directory: Path, partial: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for stale in [*directory.glob(".iter_*.partial"), *directory.glob(".iter_*.replaced")]:
        shutil.rmtree(stale)
    partial.mkdir()


def _publish(partial: Path, final: Path) -> None:
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    _write_text(partial, text)
    os.replace(partial, path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading ---------------------------------------------------------------------------------------


def _newest(directory: Path) -> Path:
    iteration = latest_iteration(directory)
    if iteration is None:
        raise UserError(f"{directory}: not a checkpoint directory: it holds no {TRACKER}")
    path = _iteration_directory(directory, iteration)
    for name in (DOCUMENT, "metadata.json", ".metadata"):
        if not (path / name).is_file():
            raise UserError(
                f"{directory / TRACKER} names iteration {iteration}, but {path / name} is missing "
                f"({_present(directory)})"
            )
    return path


def _present(directory: Path) -> str:
    names = sorted(path.name for path in directory.glob("iter_*") if (path / DOCUMENT).is_file())
    return f"present: {', '.join(names) or 'none'}"


def _read_document(path: Path) -> dict[str, Any]:
    file = path / DOCUMENT
    try:
        document = json.loads(file.read_text())
        version, _ = document["format_version"], document["state"]["model"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged ({error!r}); load another checkpoint") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file}: format_version {version}, but this version of megatron-lowbit reads "
            f"{FORMAT_VERSION}"
        )
    return document


def _check_model(path: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    _check_equal(f"{path}: saved from another model", saved, json.loads(json.dumps(expected)))


def _check_optimizer(path: Path, saved: str | None, current: str | None) -> None:
    if saved != current:
        raise UserError(
            f"{path}: saved with optimizer {saved or 'none'}, but this run's is {current}; "
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


# -- all ranks -------------------------------------------------------------------------------------


@contextmanager
def _same_outcome(doing: str, directory: Path) -> Iterator[None]:
    """An exception inside on any rank leaves this on every rank, so that none waits for another.

    UserError and whatever the operating system caused become one UserError everywhere; another
    exception is raised again where it occurred and as RuntimeError on the other ranks.
    """
    caught: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        caught = error
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, caught and _report(caught, f"cannot {doing} {directory}"))
    failed = [report for report in reports if report is not None]
    for is_user_error, message in failed:
        if is_user_error:
            raise UserError(message) from caught
    if caught is not None:
        raise caught
    if failed:
        raise RuntimeError(f"another rank failed: {failed[0][1]}")


def _report(error: BaseException, failure: str) -> tuple[bool, str]:
    """(is it the user's to mend, one line) of an exception."""
    if isinstance(error, UserError):
        return True, str(error)
    cause = checkpoint_tensors.os_error_behind(error)
    if cause is not None:
        return True, f"{failure}: {cause.strerror or cause}"
    return False, repr(error)
