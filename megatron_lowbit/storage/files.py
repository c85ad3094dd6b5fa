"""A checkpoint directory: its names, checksums and replacements.

    DIR/latest_checkpointed_iteration.txt    the newest iteration, decimal
    DIR/iter_0000100/...                     what Megatron-LM has saved
    DIR/iter_0000100/lowbit.json             length and checksum of each of these files
    DIR/.iter_0000100.replaced/...           an older one, while the iteration is saved again
    DIR/.iter_0000100.deleted/...            one that is being deleted
    DIR/.saving                              the iteration that is being saved, if higher ones exist

Megatron-LM saves an iteration again into its existing directory. A kill would leave files of two
checkpoints there, so the old directory is set aside until the new one is complete.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from os.path import lexists
from pathlib import Path
from typing import Any, cast

from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.folders import reading, replace_text, sync_directory
from megatron_lowbit.json_files import Entries, as_object, is_inside, read_object, read_small
from megatron_lowbit.storage.pickles import CONFIG as CONFIG
from megatron_lowbit.storage.pickles import check_lengths

TRACKER = "latest_checkpointed_iteration.txt"
DOCUMENT = "lowbit.json"
SAVING = ".saving"
METADATA = ".metadata"
FORMAT_VERSION = 3
_SHOWN = 5
_DIGITS = 18
"""The most in a tracker file, so that the checkpoint's folder can have the name."""
_ITERATION = re.compile(r"iter_(\d{7,})", re.A)
_UNFINISHED = re.compile(r"__\d+_\d+\.distcp|\.metadata\.tmp", re.A)
"""Files that torch writes before ``.metadata``, without which they cannot be read."""

_OF_CHECKPOINTS = re.compile(
    rf"{_UNFINISHED.pattern}|\.metadata|.*\.pt|metadata\.json|lowbit\.json|modelopt_state"
    r"|mp_rank_\d+.*|\.nfs.*", re.A,
)  # fmt: skip
"""Entries of a checkpoint's folder in any format of Megatron-LM."""

Checksums = dict[str, dict[str, Any]]
"""{"bytes", "blake2b"} by the name of a checkpoint's file."""


def iteration_directory(directory: Path, iteration: int) -> Path:
    """Return the folder of an iteration in DIR."""
    return directory / f"iter_{iteration:07d}"


def iterations(directory: Path) -> list[int]:
    """Return the iterations that have a folder in DIR, complete or not, in ascending order."""
    names = (_ITERATION.fullmatch(path.name) for path in directory.glob("iter_*"))
    numbers = (int(name[1]) for name in names if name)
    return sorted(number for number in numbers if iteration_directory(directory, number).is_dir())


def complete_iterations(directory: Path) -> list[int]:
    """Return those whose files are all there in full length; their content is not read."""
    return [i for i in iterations(directory) if _is_complete(iteration_directory(directory, i))]


def latest_iteration(directory: str | Path) -> int | None:
    """Return the iteration that DIR's tracker file names, or None if DIR has no tracker file.

    Raises UserError if the file holds anything but a decimal number.
    """
    tracker, text = Path(directory) / TRACKER, _tracker_text(directory)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise UserError(
            f"{tracker}: {text[:40]!r} is not an iteration; write the number of a complete "
            f"checkpoint into it ({alternatives(tracker.parent)})"
        )
    return int(text)


def release(directory: str | Path) -> Path | None:
    """Return DIR/release, as Megatron-LM's converters write it, where the tracker file names it."""
    return Path(directory) / "release" if _tracker_text(directory) == "release" else None


def _tracker_text(directory: str | Path) -> str | None:
    tracker = Path(directory) / TRACKER
    if not lexists(tracker):
        return None
    require(tracker.is_file(), f"{tracker}: is no file")
    return read_small(tracker).decode(errors="replace").strip()


def write_tracker(directory: Path, iteration: int) -> None:
    """Let DIR's tracker file name an iteration."""
    replace_text(directory / TRACKER, f"{iteration}\n")


def restore_tracker(directory: Path) -> None:
    """Write the last complete iteration to a tracker file of DIR that is empty or missing.

    Megatron-LM truncates the file before it writes the new iteration, and begins a new run in a
    folder without it, whose checkpoints it replaces.
    """
    tracker = directory / TRACKER
    is_missing = not lexists(tracker)
    if not is_missing and not (tracker.is_file() and not read_small(tracker).strip()):
        return
    last = last_saved(directory)
    if last is not None:
        found = "missing" if is_missing else "empty after a killed save"
        write_tracker(directory, last)
        say(f"{tracker}: {found}; restored to {last}")


def last_saved(directory: Path) -> int | None:
    """Return the newest complete iteration of DIR; None if none is complete.

    That is the highest one. After a run that went back, for which :func:`note_saving` has left a
    note, it is the highest one that this run may have saved.
    """
    complete = complete_iterations(directory)
    note = directory / SAVING
    text = note.read_text(errors="replace").strip() if note.is_file() else ""
    begun = int(text) if text.isdecimal() and len(text) <= _DIGITS else sys.maxsize
    return max([i for i in complete if i <= begun] or complete, default=None)


def note_saving(directory: Path, iteration: int) -> None:
    """Record in DIR that an iteration is saved, if DIR has higher ones of an earlier run."""
    if any(number > iteration for number in iterations(directory)):
        replace_text(directory / SAVING, f"{iteration}\n")
    else:
        (directory / SAVING).unlink(missing_ok=True)


def alternatives(directory: Path, besides: int | None = None) -> str:
    """Return the part of an error message that lists the complete checkpoints of DIR."""
    complete = [number for number in complete_iterations(directory) if number != besides]
    names = [iteration_directory(directory, number).name for number in complete[-_SHOWN:]]
    if not names:
        return "complete: none"
    more = ["..."] if len(complete) > _SHOWN else []
    return f"complete: {', '.join(more + names)}; --load-latest-valid goes back to a valid one"


def checksums(directory: Path) -> Checksums:
    """Return length and checksum of every file of a checkpoint but lowbit.json."""
    return {
        path.relative_to(directory).as_posix(): {
            "bytes": path.stat().st_size,
            "blake2b": _digest(path),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != DOCUMENT
    }


def write_document(directory: Path, document: dict[str, Any]) -> None:
    """Write lowbit.json, whole or not at all, with the format's version and its own checksum.

    ``document`` is JSON, with ``files`` as :func:`checksums` returns them.
    """
    content = json.loads(json.dumps({"format_version": FORMAT_VERSION, **document}))
    content["blake2b"] = _document_digest(content)
    replace_text(directory / DOCUMENT, json.dumps(content, indent=1) + "\n")


def read_document(path: Path) -> dict[str, Any]:
    """Read lowbit.json of a checkpoint.

    Raises UserError if it is missing, damaged or of another version.
    """
    file = path / DOCUMENT
    require(path.is_dir(), f"{path}: missing")
    require(file.is_file(), f"{file}: missing")
    document = read_object(file)
    version = Entries(document, str(file)).integer("format_version", minimum=0)
    require(
        version == FORMAT_VERSION,
        f"{file}: format_version {version}, but this version of megatron-lowbit reads "
        f"{FORMAT_VERSION}",
    )
    digest = document.pop("blake2b", None)
    is_as_saved = digest == _document_digest(document)
    require(is_as_saved, f"{file}: its content differs from what was saved")
    for name, entry in as_object(document.get("files"), f"{file}: files").items():
        recorded = Entries(entry, f"{file}: files: {name}")
        recorded.integer("bytes", minimum=0, maximum=sys.maxsize)
        recorded.string("blake2b")
        require(is_inside(name), f"{file}: files: {name}: not the name of a file in this folder")
    return document


def recorded_files(path: Path) -> Checksums | None:
    """Return lowbit.json's lengths and checksums; None without it, once the lengths are checked.

    Raises UserError where the checkpoint is missing or cut short, or lowbit.json is damaged.
    """
    if (path / DOCUMENT).exists():
        return cast(Checksums, read_document(path)["files"])
    require(path.is_dir(), f"{path}: missing")
    check_lengths(path)
    return None


def check_files(path: Path, files: Checksums, names: Iterable[str]) -> None:
    """Raise UserError at the first of ``names`` that is not as lowbit.json's ``files`` says."""
    for name in names:
        check_sizes(path, files, [name])
        with reading(path / name):
            digest = _digest(path / name)
        is_as_saved = digest == files[name]["blake2b"]
        require(is_as_saved, f"{path / name}: its content differs from what was saved")


def check_sizes(path: Path, files: Checksums, names: Iterable[str]) -> None:
    """Raise UserError at the first of ``names`` that has another length than ``files`` says."""
    for name in names:
        file, length = path / name, files[name]["bytes"]
        try:
            size = file.stat().st_size
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            reason = "missing" if is_missing else f"cannot be read ({error.strerror})"
            raise UserError(f"{file}: {reason}") from None
        require(size == length, f"{file}: {size} bytes instead of {length}")


def _is_complete(path: Path) -> bool:
    try:
        files = recorded_files(path) or {}
        check_sizes(path, files, files)
        return True
    except (UserError, OSError):
        return False


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _document_digest(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def replaced_directory(path: Path) -> Path:
    """Return the path of a checkpoint's directory while another takes its place."""
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
        remove(replaced)
    rename(path, replaced)


def is_replacement(path: Path) -> bool:
    """Return True if the checkpoint that replaces the one set aside is complete."""
    return any((path / name).is_file() for name in (METADATA, DOCUMENT)) and _is_complete(path)


def discard_replaced(path: Path) -> None:
    """Move the directory that was set aside for a checkpoint to where it will be deleted."""
    hidden = _deleted_directory(path)
    remove(hidden)
    os.rename(replaced_directory(path), hidden)


def _deleted_directory(path: Path) -> Path:
    return path.with_name(f".{path.name}.deleted")


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
        remove(path)
        rename(replaced, path)
        say(f"{path}: put back, since a killed run did not finish its replacement")
    delete_hidden(directory)


def delete_older(directory: Path, saved: int, keep: int) -> None:
    """Delete all complete checkpoints of DIR up to ``saved`` except the newest ``keep``.

    Never deleted: ``saved``, what the tracker file names, symbolic links, and whatever is not a
    complete checkpoint. A failure is printed instead of raised, so that training continues.
    """
    delete_hidden(directory)
    older = [number for number in complete_iterations(directory) if number < saved]
    named = latest_iteration(directory)
    for number in older[: max(0, len(older) - (keep - 1))]:
        path = iteration_directory(directory, number)
        if path.is_symlink() or number == named:
            continue
        hidden = _deleted_directory(path)
        try:
            rename(path, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            say(f"cannot delete the older checkpoint {path}: {error.strerror}")


def delete_hidden(directory: Path) -> None:
    """Delete the directories that this run, or a killed one, has moved out of DIR's checkpoints."""
    for hidden in _hidden(directory, "deleted"):
        remove(hidden)


def delete_unfinished(directory: Path) -> None:
    """Delete and print the checkpoints of DIR of which a killed run has written only a part.

    Kept: what the tracker file names, symbolic links, and folders with any other file.
    """
    try:
        named = latest_iteration(directory)
    except UserError:  # It is empty, or names a release.
        named = None
    for number in iterations(directory):
        path = iteration_directory(directory, number)
        if number == named or path.is_symlink():
            continue
        if all(_UNFINISHED.fullmatch(entry.name) for entry in path.iterdir()):
            remove(path)
            say(f"{path}: deleted, since a killed run did not finish it")


def check_foreign(directory: Path) -> None:
    """Raise UserError where DIR has a checkpoint's name for a file, or another program's folder.

    A save of that iteration would delete them.
    """
    for path in sorted(directory.glob("iter_*")):
        if path.is_symlink() or not _ITERATION.fullmatch(path.name):
            continue  # A save renames the link alone.
        require(path.is_dir(), f"{path}: a file with the name of a checkpoint; move it")
        names = [entry.name for entry in sorted(path.iterdir())]
        is_own = not names or any(map(_OF_CHECKPOINTS.fullmatch, names))
        shown = ", ".join(names)[:60]
        require(is_own, f"{path}: has no file of a checkpoint, but {shown}; move it")


def _hidden(directory: Path, ending: str) -> list[Path]:
    """Return the hidden folders of DIR's iterations with an ending, in ascending order."""
    name = re.compile(rf"\.iter_\d{{7,}}\.{ending}", re.A)
    return [path for path in sorted(directory.glob(".iter_*")) if name.fullmatch(path.name)]


def rename(path: Path, new: Path) -> None:
    """Rename a file or folder within its folder, on the disk as well."""
    os.rename(path, new)
    sync_directory(new.parent)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
