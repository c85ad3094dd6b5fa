"""Integrity of Megatron-LM's checkpoints: verification before loading, records after saving.

Before loading, every file is compared with its length and checksum in lowbit.json, and every
pickled object is checked without running code. Before a save, an older checkpoint of the same
iteration is set aside. After the save, rank 0 records the new files while training continues. Only
one run at a time can use a folder.
"""

import threading
from argparse import Namespace
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_tensorboard_writer, training

from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.folders import METRICS
from megatron_lowbit.megatron.run.errors import (
    raise_on_all_ranks,
    translate_load_errors,
    translate_save_errors,
)
from megatron_lowbit.megatron.run.load_source import choose_checkpoint
from megatron_lowbit.megatron.run.metrics import check_metrics
from megatron_lowbit.megatron.run.records import check_loaded, record_data
from megatron_lowbit.megatron.run.steps import steps_of
from megatron_lowbit.megatron.run.workarounds import (
    count_iterations_of_samples,
    load_what_is_not_saved,
    omit_profile_of_resumed_run,
)
from megatron_lowbit.replaced import replaced
from megatron_lowbit.storage import files
from megatron_lowbit.storage.lock import FolderLock
from megatron_lowbit.storage.selection import load_directory, selected

_NON_PERSISTENT = "non_persistent"
LOG_FILE = "megatron.log"
_WRITTEN_IN_PLACE = (
    files.TRACKER, METRICS, LOG_FILE, _NON_PERSISTENT, "progress.txt",
    "latest_wandb_artifact_path.txt",
)  # fmt: skip
"""Names in ``--save`` that are written without being replaced."""


class CheckpointGuard:
    """``pre_wrap_hook`` that verifies the checkpoint to load, and records the saved ones.

    The guard locks the run's ``--save``. Close it at the end of the run.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._opened = ExitStack()
        self._recorder: Recorder | None = None
        self._upstream_load = training.load_checkpoint
        self._upstream_save = training.save_checkpoint

    def __call__(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Verify the checkpoint to load, before the model's other hooks read it.

        All ranks raise UserError where another run saves into the same folder, or a file of the
        checkpoint is missing, truncated or changed.
        """
        if self._args.save is not None:
            self._take_save_folder(Path(self._args.save))
            self._opened.enter_context(replaced(training, "save_checkpoint", self._save))
        record_data(self._args)
        self._opened.enter_context(replaced(training, "load_checkpoint", self._load))
        choose_checkpoint(self._args)
        check_loaded(self._args)
        if self._recorder is not None:
            steps_of(self._args, chunks).listeners.append(self._recorder.begin_step)
        return chunks

    def _take_save_folder(self, directory: Path) -> None:
        """Lock ``--save`` and complete or undo the replacements of a killed run, on rank 0."""
        with raise_on_all_ranks("save into", directory):
            if dist.get_rank() == 0:
                if not directory.exists():
                    directory.mkdir(parents=True, exist_ok=True)
                    self._opened.callback(_remove_if_empty, directory)
                self._opened.enter_context(closing(FolderLock(directory)))
                check_metrics(directory)
                for folder in filter(None, (directory, _non_persistent_directory(self._args))):
                    for name in _WRITTEN_IN_PLACE:
                        path = folder / name
                        require(not path.is_symlink(), f"{path}: a link is not written; delete it")
                        is_usual = path.is_dir() if name == _NON_PERSISTENT else path.is_file()
                        require(is_usual or not path.exists(), f"{path}: in the way; move it")
                    files.settle_replaced(folder)
                    files.delete_unfinished(folder)
                    files.check_foreign(folder)
                recorder = Recorder(directory, self._args.save_keep_last)
                self._recorder = self._opened.enter_context(closing(recorder))

    def _load(self, *arguments: Any, **settings: Any) -> Any:
        """Load the verified checkpoint by Megatron-LM's function; explain what it cannot load."""
        directory = load_directory(self._args)
        checkpoint = selected(self._args, directory)
        if checkpoint is None:
            return self._upstream_load(*arguments, **settings)
        resumed = self._args.load is not None and directory == Path(self._args.load)
        argument = "--load" if resumed else "--pretrained-checkpoint"
        errors = translate_load_errors(f"{argument} {checkpoint.path}")
        with errors, load_what_is_not_saved(self._args):
            loaded = self._upstream_load(*arguments, **settings)
        omit_profile_of_resumed_run(self._args, iteration=loaded[0])
        count_iterations_of_samples(self._args, iteration=loaded[0])
        return loaded

    def _save(self, iteration: int, *arguments: Any, **settings: Any) -> None:
        """Set aside an older checkpoint of the iteration, and save by Megatron-LM's function.

        Metrics are written first: a run that resumes from the checkpoint does not repeat them.
        """
        directory: Path | None = Path(self._args.save)
        if settings.get("non_persistent_ckpt"):
            directory = _non_persistent_directory(self._args)
        with translate_save_errors(directory or Path(self._args.save)):
            with raise_on_all_ranks("save into", directory or Path(self._args.save)):
                if (writer := get_tensorboard_writer()) is not None:
                    writer.flush()
                if self._recorder is not None and directory is not None:
                    self._recorder.begin_save(files.iteration_directory(directory, iteration))
            self._upstream_save(iteration, *arguments, **settings)

    def close(self) -> None:
        """Record the remaining checkpoints, and release the folder."""
        self._opened.close()


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):  # The folder of a refused run is empty.
        directory.rmdir()


def _non_persistent_directory(args: Namespace) -> Path | None:
    if args.non_persistent_ckpt_type != "global":
        return None
    return Path(args.non_persistent_global_ckpt_dir or Path(args.save) / _NON_PERSISTENT)


class Recorder:
    """Thread that records the files of new checkpoints in a folder, and deletes older ones.

    ``directory`` is the run's ``--save``; ``keep_last`` complete checkpoints stay, all for None.
    """

    def __init__(self, directory: Path, keep_last: int | None) -> None:
        self._directory, self._keep_last = directory, keep_last
        self._thread: threading.Thread | None = None
        self._seen = self._tracker_version()
        self._begun: set[Path] = set()
        self._replacements: list[Path] = []

    def begin_save(self, path: Path) -> None:
        """Set aside an existing checkpoint at the path of a new one."""
        self._begun.add(path)
        if path.is_symlink() or path.exists():
            files.set_aside(path)
            self._replacements.append(path)
        if path.parent == self._directory:
            files.note_saving(self._directory, int(path.name.removeprefix("iter_")))

    def begin_step(self, iteration: int, training: bool) -> None:
        """Start to record a newly saved checkpoint, before the first forward pass of each step."""
        saved = self._newly_saved()
        if self._thread is None or not self._thread.is_alive():
            discarded = self._discard_replaced()
            if saved is not None or discarded:
                self._thread = threading.Thread(
                    target=self._finish, args=(saved, discarded), daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Record all checkpoints without a record, and wait for the thread."""
        if self._thread is not None:
            self._thread.join()
        self._newly_saved()
        for iteration in files.complete_iterations(self._directory):
            path = files.iteration_directory(self._directory, iteration)
            if path in self._begun and not (path / files.DOCUMENT).exists():
                self._record(path)
        self._finish(None, self._discard_replaced())

    def _newly_saved(self) -> Path | None:
        """Return this run's checkpoint in the tracker file if it changed since the last call."""
        version = self._tracker_version()
        if version == self._seen:
            return None
        try:
            latest = files.latest_iteration(self._directory)
        except UserError:
            return None  # The tracker file is incomplete, or names a release.
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
        """Hide checkpoints that complete ones have replaced; return their parent folders.

        Not in the thread, which might otherwise delete what the next save sets aside.
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
            say(f"cannot record the files of {path}: {error.strerror}")
            return
        self._begun.discard(path)
        if self._keep_last is not None:
            iteration = int(path.name.removeprefix("iter_"))
            files.delete_older(self._directory, iteration, self._keep_last)
