"""Guards around Megatron-LM's checkpoints: whole before they are loaded, on record once saved.

Before loading, every file is compared with the length and checksum that lowbit.json records, and
every object is read without running code. After a save, rank 0 records the new checkpoint's files
while training goes on. Both come in as hooks of the model's configuration and its forward passes.
"""

import threading
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lowbit.checkpoints import files
from megatron_lowbit.checkpoints.pickles import check_lengths, check_objects
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.same_outcome import same_outcome
from megatron_lowbit.megatron.steps import steps_of

_READING = "read the checkpoint in"


class CheckpointGuard:
    """A ``pre_wrap_hook``: verifies what the run loads, and watches for what it saves.

    Close it when the run has ended.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._recorder: Recorder | None = None

    def __call__(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Verify the checkpoint that is to be loaded, before the model's other hooks read it.

        Raises UserError on every rank, naming the missing, cut or changed file.
        """
        iteration = _choose(self._args) if self._args.load is not None else None
        if self._args.save is not None and dist.get_rank() == 0:
            self._recorder = Recorder(Path(self._args.save), iteration, self._args.save_keep_last)
            steps_of(self._args, chunks).listeners.append(self._recorder.begin_step)
        return chunks

    def close(self) -> None:
        """Record what is left."""
        if self._recorder is not None:
            self._recorder.close()


# -- before loading --------------------------------------------------------------------------------


def _choose(args: Namespace) -> int | None:
    """Return the iteration that Megatron-LM is going to load, verified; None where there is none.

    With ``--load-latest-valid`` an invalid checkpoint is skipped, which is printed, for the newest
    valid one before it. All ranks share the reading.
    """
    directory = Path(args.load)
    release = None if args.ckpt_step else files.release(directory)
    if release is not None:
        _verify(release)
        return None
    skipped: UserError | None = None
    for iteration in _candidates(args, directory):
        path = files.iteration_directory(directory, iteration)
        try:
            _verify(path)
        except UserError as error:
            if not args.load_latest_valid:
                others = files.alternatives(directory, besides=iteration)
                raise UserError(f"{error} ({others})") from error
            _print(f"--load-latest-valid: skipped {path.name}: {error}")
            skipped = error
            continue
        if skipped is not None or args.load_latest_valid:
            args.ckpt_step = iteration  # Megatron-LM's argument for another one than the newest
        return iteration
    if skipped is not None:
        raise UserError(
            f"{directory}: no valid checkpoint to go back to; the last tried: {skipped}"
        )
    return None


def _candidates(args: Namespace, directory: Path) -> list[int]:
    """Return the iterations to try, in this order; the same on all ranks."""
    found: list[list[int]] = [[]]
    with same_outcome(_READING, directory):
        if dist.get_rank() == 0:
            found = [_candidates_on_disk(args, directory)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _candidates_on_disk(args: Namespace, directory: Path) -> list[int]:
    if args.ckpt_step:
        return [args.ckpt_step]
    _mend_empty_tracker(directory)
    newest_first = files.iterations(directory)[::-1]
    if not args.load_latest_valid:
        latest = files.latest_iteration(directory)
        return [] if latest is None else [latest]
    try:
        latest = files.latest_iteration(directory)
    except UserError as error:
        _print(f"--load-latest-valid: {error}")
        return newest_first
    if latest is None:
        return newest_first
    return [latest, *(number for number in newest_first if number < latest)]


def _mend_empty_tracker(directory: Path) -> None:
    """Let a tracker file name the newest complete checkpoint again, where a killed save emptied it.

    Megatron-LM truncates the file before it writes the new number.
    """
    tracker = directory / files.TRACKER
    if not tracker.is_file() or tracker.read_text(errors="replace").strip():
        return
    complete = files.complete_iterations(directory)
    if complete:
        files.write_tracker(directory, complete[-1])
        _print(f"{tracker}: empty, as a killed save leaves it; it names {complete[-1]} again")


def _verify(path: Path) -> None:
    """Raise UserError on every rank where a checkpoint is not as it was saved."""
    with same_outcome(_READING, path.parent):
        if (path / files.DOCUMENT).exists():
            recorded = files.read_document(path)["files"]
            by_size = sorted(recorded, key=lambda name: (-recorded[name]["bytes"], name))
            files.check_files(path, recorded, by_size[dist.get_rank() :: dist.get_world_size()])
        elif not path.is_dir():
            raise UserError(f"{path}: missing")
        elif dist.get_rank() == 0:
            check_lengths(path)
            _print(f"{path}: no {files.DOCUMENT}: loaded without comparing checksums")
    with same_outcome(_READING, path.parent):
        if dist.get_rank() == 0:
            check_objects(path)


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


# -- after saving ----------------------------------------------------------------------------------


class Recorder:
    """Records the files of new checkpoints in a folder, and deletes older ones, in a thread.

    Args:
        directory: the run's ``--save``.
        start: the iteration that the run goes on from, or None.
        keep_last: complete checkpoints to keep; None for all.
    """

    def __init__(self, directory: Path, start: int | None, keep_last: int | None) -> None:
        self._directory, self._start, self._keep_last = directory, start or 0, keep_last
        self._thread: threading.Thread | None = None
        self._seen = self._tracker_version()
        # Left by a run that went further. Until they are saved anew their records must stay: they
        # may be what this run went back from.
        self._old = {number for number in files.iterations(directory) if number > self._start}

    def begin_step(self, iteration: int, training: bool) -> None:
        """Begin to record a checkpoint that has appeared; called at the first pass of each step."""
        if training and iteration + 1 in self._old:
            # This step may end in a save, whose files the old record does not fit.
            path = files.iteration_directory(self._directory, iteration + 1)
            (path / files.DOCUMENT).unlink(missing_ok=True)
        saved = self._newly_saved()
        if saved is not None and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._record, args=(saved,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Record every checkpoint that is not yet on record; wait until that is done."""
        if self._thread is not None:
            self._thread.join()
        self._newly_saved()
        for iteration in files.complete_iterations(self._directory):
            path = files.iteration_directory(self._directory, iteration)
            is_new = iteration > self._start and iteration not in self._old
            if is_new and not (path / files.DOCUMENT).exists():
                self._record(iteration)

    def _newly_saved(self) -> int | None:
        """Return what the tracker file names if it has been written since the last call."""
        version = self._tracker_version()
        if version == self._seen:
            return None
        try:
            latest = files.latest_iteration(self._directory)
        except UserError:
            return None  # The tracker file is being written, or names a release.
        self._seen = version
        if latest is None or latest <= self._start:
            return None
        self._old.discard(latest)
        return latest

    def _tracker_version(self) -> tuple[int, int] | None:
        try:
            status = (self._directory / files.TRACKER).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _record(self, iteration: int) -> None:
        path = files.iteration_directory(self._directory, iteration)
        try:
            files.write_document(path, {"files": files.checksums(path)})
        except OSError as error:
            print(f"cannot record the files of {path}: {error.strerror}", flush=True)
            return
        if self._keep_last is not None:
            files.delete_older(self._directory, iteration, self._keep_last)
