"""Guards around Megatron-LM's checkpoints: whole before they are loaded, on record once saved.

Before loading, every file is compared with the length and checksum that lowbit.json records, and
every object is read without running code. Before a save, an older checkpoint of the iteration is
set aside; after it, rank 0 records the new one's files while training goes on. The folder belongs
to one run at a time.
"""

import threading
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.training import get_tensorboard_writer, training

from megatron_lowbit.checkpoints import files
from megatron_lowbit.checkpoints.lock import FolderLock
from megatron_lowbit.checkpoints.pickles import check_lengths, check_objects
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.same_outcome import same_outcome
from megatron_lowbit.megatron.steps import steps_of

_READING = "read the checkpoint in"


class CheckpointGuard:
    """A ``pre_wrap_hook``: verifies what the run loads, and watches over what it saves.

    It locks the run's ``--save``. Close it when the run has ended.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._lock: FolderLock | None = None
        self._made_folder = False
        self._recorder: Recorder | None = None
        self._upstream_save = training.save_checkpoint

    def __call__(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Verify the checkpoint that is to be loaded, before the model's other hooks read it.

        Raises UserError on every rank: another run saves into the same folder, or a file of the
        checkpoint is missing, cut or changed.
        """
        if self._args.save is not None:
            self._take_save_folder(Path(self._args.save))
        if self._args.load is not None:
            _choose(self._args)
        if self._args.save is not None:
            training.save_checkpoint = self._save
        if self._recorder is not None:
            steps_of(self._args, chunks).listeners.append(self._recorder.begin_step)
        return chunks

    def _take_save_folder(self, directory: Path) -> None:
        """Lock ``--save``, and end what a killed run has left there; on rank 0."""
        with same_outcome("save into", directory):
            if dist.get_rank() == 0:
                self._made_folder = not directory.exists()
                directory.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(directory)
                files.settle_replaced(directory)
                if (temporary := _non_persistent_directory(self._args)) is not None:
                    files.settle_replaced(temporary)
                self._recorder = Recorder(directory, self._args.save_keep_last)

    def _save(self, iteration: int, *arguments: Any, **settings: Any) -> None:
        """Save as Megatron-LM does, once an older checkpoint of the iteration is set aside.

        What the run has logged so far is written first: a run that goes on from the checkpoint logs
        what comes after it only.
        """
        directory: Path | None = Path(self._args.save)
        if settings.get("non_persistent_ckpt"):
            directory = _non_persistent_directory(self._args)
        with same_outcome("save into", directory or Path(self._args.save)):
            if (writer := get_tensorboard_writer()) is not None:
                writer.flush()
            if self._recorder is not None and directory is not None:
                self._recorder.begin_save(files.iteration_directory(directory, iteration))
        self._upstream_save(iteration, *arguments, **settings)

    def close(self) -> None:
        """Record what is left, and release the folder."""
        training.save_checkpoint = self._upstream_save
        if self._recorder is not None:
            self._recorder.close()
        if self._lock is not None:
            self._lock.close()
        if self._made_folder:
            with suppress(OSError):  # It stays unless it is empty, as a refused run leaves it.
                Path(self._args.save).rmdir()


def _non_persistent_directory(args: Namespace) -> Path | None:
    """Return where Megatron-LM keeps the newest checkpoint between two that stay, if it does."""
    if args.non_persistent_ckpt_type != "global":
        return None
    return Path(args.non_persistent_global_ckpt_dir or Path(args.save) / "non_persistent")


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
                if files.replaced_directory(path).exists():
                    others += (
                        f"; a start with --save {directory} puts back what a killed run set aside"
                    )
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
    """Let a tracker file name the last complete checkpoint again, where a killed save emptied it.

    Megatron-LM truncates the file before it writes the new number.
    """
    tracker = directory / files.TRACKER
    if not tracker.is_file() or tracker.read_text(errors="replace").strip():
        return
    last = files.last_saved(directory)
    if last is not None:
        files.write_tracker(directory, last)
        _print(f"{tracker}: empty, as a killed save leaves it; it names {last} again")


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
        keep_last: complete checkpoints to keep; None for all.
    """

    def __init__(self, directory: Path, keep_last: int | None) -> None:
        self._directory, self._keep_last = directory, keep_last
        self._thread: threading.Thread | None = None
        self._seen = self._tracker_version()
        self._begun: set[Path] = set()
        self._replacements: list[Path] = []

    def begin_save(self, path: Path) -> None:
        """Set aside what is at the place of a checkpoint that is about to be saved."""
        self._begun.add(path)
        if path.is_symlink() or path.exists():
            files.set_aside(path)
            self._replacements.append(path)

    def begin_step(self, iteration: int, training: bool) -> None:
        """Begin to record a checkpoint that has appeared; called at the first pass of each step."""
        saved = self._newly_saved()
        if self._thread is None or not self._thread.is_alive():
            discarded = self._discard_replaced()
            if saved is not None or discarded:
                self._thread = threading.Thread(
                    target=self._finish, args=(saved, discarded), daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Record every checkpoint that is not yet on record; wait until that is done."""
        if self._thread is not None:
            self._thread.join()
        self._newly_saved()
        for iteration in files.complete_iterations(self._directory):
            path = files.iteration_directory(self._directory, iteration)
            if path in self._begun and not (path / files.DOCUMENT).exists():
                self._record(path)
        self._finish(None, self._discard_replaced())

    def _newly_saved(self) -> Path | None:
        """Return what the tracker file names if it has been written since the last call."""
        version = self._tracker_version()
        if version == self._seen:
            return None
        try:
            latest = files.latest_iteration(self._directory)
        except UserError:
            return None  # The tracker file is being written, or names a release.
        self._seen = version
        path = files.iteration_directory(self._directory, latest or 0)
        return path if path in self._begun else None

    def _tracker_version(self) -> tuple[int, int] | None:
        try:
            status = (self._directory / files.TRACKER).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _discard_replaced(self) -> set[Path]:
        """Move out of the way what complete checkpoints replace; return the folders it was in.

        Here and not in the thread, which must not take away what the next save sets aside.
        """
        complete = [path for path in self._replacements if files.is_replacement(path)]
        for path in complete:
            self._replacements.remove(path)
            if files.replaced_directory(path).exists():
                files.discard_replaced(path)
        return {path.parent for path in complete}

    def _finish(self, saved: Path | None, discarded: set[Path]) -> None:
        for directory in discarded:
            files.delete_hidden(directory)
        if saved is not None:
            self._record(saved)

    def _record(self, path: Path) -> None:
        try:
            files.write_document(path, {"files": files.checksums(path)})
        except OSError as error:
            print(f"cannot record the files of {path}: {error.strerror}", flush=True)
            return
        self._begun.discard(path)
        if self._keep_last is not None:
            iteration = int(path.name.removeprefix("iter_"))
            files.delete_older(self._directory, iteration, self._keep_last)
