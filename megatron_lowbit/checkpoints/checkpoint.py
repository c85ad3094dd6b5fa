"""An opened checkpoint: the newest of a directory, or one of its iterations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lowbit.checkpoints.model_arguments import model_of
from megatron_lowbit.checkpoints.reader import CheckpointReader
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries
from megatron_lowbit.recipes.record import Record, checked
from megatron_lowbit.storage import files
from megatron_lowbit.storage.pickles import check_lengths

EMBEDDING = "embedding.word_embeddings.weight"


class Checkpoint(NamedTuple):
    """An opened checkpoint: its folder, the checksums of its files, and its tensors.

    ``files`` are lengths and checksums by name, None for checkpoints of Megatron-LM alone.
    """

    path: Path
    files: dict[str, dict[str, Any]] | None
    tensors: CheckpointReader

    @property
    def recipes(self) -> list[str]:
        """Names of the recipes of training; none where it had none."""
        return self._names("precision_recipe")

    @property
    def recipe_set(self) -> list[str]:
        """Changes of these recipes' fields."""
        return self._names("recipe_set")

    @property
    def recipe_record(self) -> Record | None:
        """Text of the recipe of training, see ``recipes.record``; None in older checkpoints."""
        record = getattr(self.tensors.args, "recipe_record", None)
        return None if record is None else checked(record, f"{self.path}: recipe_record")

    @property
    def data_record(self) -> dict[str, str]:
        """Digests of the data sets of training by prefix; none in older checkpoints."""
        record = getattr(self.tensors.args, "data_record", None) or {}
        entries = Entries(record, f"{self.path}: data_record")
        return {prefix: entries.string(prefix) for prefix in entries}

    def _names(self, argument: str) -> list[str]:
        place = f"{self.path}: arguments"
        return list(Entries(vars(self.tensors.args), place).strings(argument))

    @property
    def iteration(self) -> int:
        """Number of iterations after which it was saved."""
        return self.tensors.common.get("iteration", 0)

    def model(self, vocab_size: int | None = None) -> dict[str, Any]:
        """Return the arguments that describe the model.

        Args:
            vocab_size: rows of the vocabulary that stand for tokens; None for those that training
                was told, or else all.
        """
        entry = self.tensors.model.get(EMBEDDING)
        require(entry is not None, f"{self.path}: no tensor {EMBEDDING}")
        rows, args = entry.size[0], self.tensors.args
        require(
            vocab_size is None or 0 < vocab_size <= rows,
            f"--vocab-size {vocab_size}: the vocabulary of {self.path} has {rows} rows",
        )
        told = Entries(vars(args), f"{self.path}: arguments").integer("vocab_size", rows)
        return model_of(args, vocab_size or min(told, rows))

    def fingerprint(self) -> dict[str, Any]:
        """Return the lengths and times of the files, as JSON; they change with the checkpoint."""
        stats = {path.name: path.stat() for path in sorted(self.path.iterdir())}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def open_checkpoint(source: Path, check: bool = True) -> Checkpoint:
    """Open the newest checkpoint of a ``--save`` directory, or one of its iterations' folders.

    Args:
        source: the directory or the folder.
        check: compare its files with the checksums on record.

    Raises:
        UserError: there is no checkpoint, or one of its files has changed since it was saved.
    """
    # A --save directory may hold a .metadata by accident.
    is_directory = (source / files.TRACKER).exists() or files.iterations(source)
    is_iteration = (source / files.METADATA).is_file() and not is_directory
    path = source if is_iteration else _newest(source)
    if not (path / files.DOCUMENT).is_file():
        require(path.is_dir(), f"{path}: missing")
        check_lengths(path)
        return Checkpoint(path, None, CheckpointReader(path))
    recorded = files.read_document(path)["files"]
    if check:
        files.check_files(path, recorded, recorded)
    return Checkpoint(path, recorded, CheckpointReader(path))


def _newest(source: Path) -> Path:
    """Return the folder that a directory's tracker file names."""
    if (release := files.release(source)) is not None:
        return release
    iteration = files.latest_iteration(source)
    if iteration is None:
        held = [files.iteration_directory(source, each).name for each in files.iterations(source)]
        named = f"name one of its iterations: {', '.join(held[-5:])}" if held else (
            f"neither a checkpoint directory, with {files.TRACKER}, nor one of its iterations, "
            "with .metadata"
        )  # fmt: skip
        raise UserError(f"{source}: {named}")
    return files.iteration_directory(source, iteration)


def chosen_iterations(source: Path, last: int | None, named: Sequence[int]) -> list[int]:
    """Return the ``last`` complete checkpoints of a directory, or those of the named iterations.

    Raises:
        UserError: they are not there.
    """
    complete = files.complete_iterations(source)
    if missing := sorted(set(named) - set(complete)):
        raise UserError(
            f"{source}: no complete checkpoint of iteration {missing[0]} "
            f"(complete: {', '.join(map(str, complete)) or 'none'})"
        )
    if named:
        return sorted(set(named))
    if last is None or not 1 <= last <= len(complete):
        raise UserError(f"{source}: --last {last}: it holds {len(complete)} complete checkpoints")
    return complete[-last:]
