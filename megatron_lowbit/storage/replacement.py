"""Replacement and deletion of checkpoints' directories, safe against kills.

Megatron-LM saves an iteration again into its existing directory. A kill would leave files of two
checkpoints there, so the old directory is set aside until the new one is complete.
"""

import os
import re
import shutil
from collections.abc import Iterator
from os.path import lexists
from pathlib import Path

from megatron_lowbit.errors import UserError, say
from megatron_lowbit.folders import sync_directory
from megatron_lowbit.storage import files

_UNFINISHED = re.compile(r"__\d+_\d+\.distcp|\.metadata\.tmp", re.A)
"""Files that torch writes before ``.metadata``, without which they cannot be read."""


def replace_directory(partial: Path, final: Path) -> None:
    """Rename a finished directory to its final name, replacing an older one.

    Killed between its two renames, it leaves the old one for :func:`restore_replaced`.
    """
    replaced = replaced_directory(final)
    sync_directory(partial)
    if lexists(final):
        os.rename(final, replaced)
    os.rename(partial, final)
    sync_directory(final.parent)
    _remove(replaced)


def restore_replaced(final: Path) -> bool:
    """Recover from a killed :func:`replace_directory`; return True if the old one is back.

    If the new one is already in its place, the old one is deleted instead.
    """
    replaced = replaced_directory(final)
    is_lost = lexists(replaced) and not lexists(final)
    if is_lost:
        os.rename(replaced, final)
        sync_directory(final.parent)
    else:
        _remove(replaced)
    return is_lost


def delete_older(directory: Path, saved: int, keep: int) -> None:
    """Delete all complete checkpoints of DIR up to ``saved`` except the newest ``keep``.

    Never deleted: ``saved``, what the tracker file names, symbolic links, and whatever is not a
    complete checkpoint. A failure is printed instead of raised, so that training continues.
    """
    delete_hidden(directory)
    older = [number for number in files.complete_iterations(directory) if number < saved]
    named = files.latest_iteration(directory)
    for number in older[: max(0, len(older) - (keep - 1))]:
        path = files.iteration_directory(directory, number)
        if path.is_symlink() or number == named:
            continue
        hidden = path.with_name(f".{path.name}.deleted")
        try:
            os.rename(path, hidden)
            sync_directory(directory)
            shutil.rmtree(hidden)
        except OSError as error:
            say(f"cannot delete the older checkpoint {path}: {error.strerror}")


def delete_hidden(directory: Path) -> None:
    """Delete what was moved out of DIR's checkpoints to be deleted, also by a killed run."""
    for hidden in _hidden(directory, "deleted"):
        _remove(hidden)


def delete_unfinished(directory: Path) -> None:
    """Delete and print the checkpoints of DIR of which a killed run has written only a part.

    Kept: what the tracker file names, symbolic links, and folders with any other file.
    """
    try:
        named = files.latest_iteration(directory)
    except UserError:  # It is empty, or names a release.
        named = None
    for number in files.iterations(directory):
        path = files.iteration_directory(directory, number)
        if number == named or path.is_symlink():
            continue
        if all(_UNFINISHED.fullmatch(entry.name) for entry in path.iterdir()):
            _remove(path)
            say(f"{path}: deleted, since a killed run did not finish it")


def _hidden(directory: Path, ending: str) -> Iterator[Path]:
    """Yield the hidden folders of DIR's iterations with an ending, in ascending order."""
    name = re.compile(rf"\.iter_\d{{7,}}\.{ending}", re.A)
    yield from (path for path in sorted(directory.glob(".iter_*")) if name.fullmatch(path.name))


def replaced_directory(path: Path) -> Path:
    """Return where a checkpoint's directory is while another takes its place."""
    return path.with_name(f".{path.name}.replaced")


def set_aside(path: Path) -> None:
    """Rename the existing checkpoint of an iteration that is saved again.

    If one is set aside already, the newer complete one takes its place. An incomplete checkpoint
    stays: a save in the background is about to complete it.
    """
    replaced = replaced_directory(path)
    if lexists(replaced):
        if not is_replacement(path):
            return
        _remove(replaced)
    os.rename(path, replaced)
    sync_directory(path.parent)


def is_replacement(path: Path) -> bool:
    """Return True if the checkpoint that replaces the one set aside is complete."""
    if not any((path / name).is_file() for name in (files.METADATA, files.DOCUMENT)):
        return False
    # Megatron-LM's own formats end with METADATA, torch_dist with CONFIG after it.
    needs_config = (replaced_directory(path) / files.CONFIG).is_file()
    has_config = (path / files.CONFIG).is_file()
    return (has_config or not needs_config) and files.is_complete(path)


def discard_replaced(path: Path) -> None:
    """Move what was set aside for a checkpoint out of the way, for ``delete_hidden``."""
    hidden = path.with_name(f".{path.name}.deleted")
    _remove(hidden)
    os.rename(replaced_directory(path), hidden)


def settle_replaced(directory: Path) -> None:
    """Recover from a run that was killed while it saved an iteration again.

    The new checkpoint stays if it is complete, otherwise the old one comes back. No run may be
    saving into DIR.
    """
    for replaced in _hidden(directory, "replaced"):
        path = replaced.with_name(replaced.name[1:].removesuffix(".replaced"))
        if is_replacement(path):
            discard_replaced(path)
            continue
        _remove(path)
        os.rename(replaced, path)
        sync_directory(directory)
        say(f"{path}: put back, since a killed run did not finish its replacement")
    delete_hidden(directory)


def _remove(path: Path) -> None:
    """Delete a file, a link or a folder, if there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
