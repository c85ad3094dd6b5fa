"""Finding a checkpoint and opening it: a directory of checkpoints, or one of its iterations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lowbit.conversion.megatron_files import Tensors
from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_files as files


class Checkpoint(NamedTuple):
    """One iteration: its folder, lowbit.json and tensors."""

    path: Path
    document: dict[str, Any]
    tensors: Tensors

    @property
    def model(self) -> dict[str, Any]:
        """The model's arguments."""
        return self.document["state"]["model"]


def open_checkpoint(source: Path, check: bool = True) -> Checkpoint:
    """The newest checkpoint of a ``--save`` directory, or the one of an ``iter_NNNNNNN`` folder.

    Raises UserError where there is none, or (``check``) one of its files is not as it was saved.
    """
    path = source
    if not (source / files.DOCUMENT).is_file() and not (source / ".metadata").is_file():
        iteration = files.latest_iteration(source)
        if iteration is None:
            raise UserError(
                f"{source}: neither a checkpoint directory, with {files.TRACKER}, nor one of its "
                f"iterations, with {files.DOCUMENT}"
            )
        path = files.iteration_directory(source, iteration)
    document = files.read_document(path)
    if check:
        files.check_files(path, document["files"], document["files"])
    return Checkpoint(path, document, Tensors(path))


def chosen_iterations(source: Path, last: int | None, named: Sequence[int]) -> list[int]:
    """The ``last`` complete checkpoints of a directory, or those of the named iterations.

    Raises UserError where they are not there.
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
