"""Files of a checkpoint directory: names, checksums, and which checkpoint Megatron-LM loads.

    DIR/latest_checkpointed_iteration.txt    the newest iteration, decimal
    DIR/iter_0000100/...                     what Megatron-LM has saved
    DIR/iter_0000100/lowbit.json             length and checksum of each of these files
    DIR/.iter_0000100.replaced/...           an older one, while the iteration is saved again
    DIR/.iter_0000100.deleted/...            one that is being deleted
    DIR/.saving                              the iteration that is being saved, if higher ones exist

The selection follows ``load_checkpoint`` and ``load_args_from_checkpoint`` of Megatron-LM, so that
a checkpoint is verified before any of its bytes are read. Nothing here talks to other ranks.
"""

import hashlib
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.folders import replace_text
from megatron_lowbit.json_files import Entries, as_object, is_inside, read_object
from megatron_lowbit.storage.pickles import check_lengths

TRACKER = "latest_checkpointed_iteration.txt"
DOCUMENT = "lowbit.json"
SAVING = ".saving"
METADATA = ".metadata"
CONFIG = "metadata.json"
FORMAT_VERSION = 3
_SHOWN = 5
_DIGITS = 18
"""The most in a tracker file, so that the checkpoint's folder can have the name."""


def iteration_directory(directory: Path, iteration: int) -> Path:
    """Return the folder of an iteration in DIR."""
    return directory / f"iter_{iteration:07d}"


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
    """Return DIR/release where the tracker file names it: a checkpoint without an iteration.

    Megatron-LM's converters write such ones.
    """
    return Path(directory) / "release" if _tracker_text(directory) == "release" else None


def _tracker_text(directory: str | Path) -> str | None:
    tracker = Path(directory) / TRACKER
    if not os.path.lexists(tracker):
        return None
    require(tracker.is_file(), f"{tracker}: is no file")
    try:
        return tracker.read_text(errors="replace").strip()
    except OSError as error:
        raise UserError(f"{tracker}: cannot be read ({error.strerror})") from None


def iterations(directory: Path) -> list[int]:
    """Return the iterations that have a folder in DIR, complete or not, in ascending order."""
    found = (re.fullmatch(r"iter_(\d{7,})", path.name, re.A) for path in directory.glob("iter_*"))
    numbers = (int(match[1]) for match in found if match)
    return sorted(number for number in numbers if iteration_directory(directory, number).is_dir())


def complete_iterations(directory: Path) -> list[int]:
    """Return those whose files are all there in full length; their content is not read."""
    return [i for i in iterations(directory) if is_complete(iteration_directory(directory, i))]


def last_saved(directory: Path) -> int | None:
    """Return the newest complete iteration of DIR; None if none is complete.

    That is the highest one. After a run that went back, for which :func:`note_saving` has left a
    note, it is the highest one that this run may have saved.
    """
    complete = complete_iterations(directory)
    note = directory / SAVING
    text = note.read_text(errors="replace").strip() if note.is_file() else ""
    begun = int(text) if text.isdecimal() and len(text) <= _DIGITS else None
    own = [number for number in complete if begun is None or number <= begun]
    return max(own or complete, default=None)


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


def checksums(directory: Path) -> dict[str, dict[str, Any]]:
    """Return {"bytes", "blake2b"} of every file of a checkpoint by its name, lowbit.json apart."""
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

    Args:
        directory: the checkpoint's.
        document: JSON; ``files`` as :func:`checksums` returns them.
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
    version = Entries(document, str(file)).integer("format_version", least=0)
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file}: format_version {version}, but this version of megatron-lowbit reads "
            f"{FORMAT_VERSION}"
        )
    digest = document.pop("blake2b", None)
    if digest != _document_digest(document):
        raise UserError(f"{file}: its content differs from what was saved")
    for name, entry in as_object(document.get("files"), f"{file}: files").items():
        recorded = Entries(entry, f"{file}: files: {name}")
        recorded.integer("bytes", least=0, most=sys.maxsize)
        recorded.string("blake2b")
        require(is_inside(name), f"{file}: files: {name}: not the name of a file in this folder")
    return document


def check_files(path: Path, files: dict[str, dict[str, Any]], names: Iterable[str]) -> None:
    """Raise UserError at the first of ``names`` that is not as lowbit.json's ``files`` says."""
    for name in names:
        check_sizes(path, files, [name])
        try:
            digest = _digest(path / name)
        except OSError as error:
            raise UserError(f"{path / name}: cannot be read ({error.strerror})") from error
        if digest != files[name]["blake2b"]:
            raise UserError(f"{path / name}: its content differs from what was saved")


def check_sizes(path: Path, files: dict[str, dict[str, Any]], names: Iterable[str]) -> None:
    """Raise UserError at the first of ``names`` that has another length than ``files`` says."""
    for name in names:
        file, length = path / name, files[name]["bytes"]
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise UserError(f"{file}: missing") from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error
        require(size == length, f"{file}: {size} bytes instead of {length}")


def is_complete(path: Path) -> bool:
    """Return True if all files of a checkpoint are there in full length; content is not read."""
    try:
        if not (path / DOCUMENT).exists():
            check_lengths(path)
            return True
        files = read_document(path)["files"]
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


def write_tracker(directory: Path, iteration: int) -> None:
    """Let DIR's tracker file name an iteration."""
    replace_text(directory / TRACKER, f"{iteration}\n")


class Selected(NamedTuple):
    """Folder of a checkpoint, and its iteration: None for a release."""

    path: Path
    iteration: int | None


def load_directory(args: Namespace) -> Path | None:
    """Return ``--load``, or ``--pretrained-checkpoint`` if ``--load`` has no tracker file."""
    if args.pretrained_checkpoint is None:
        return args.load and Path(args.load)
    if args.load is not None and (Path(args.load) / TRACKER).is_file():
        return Path(args.load)
    return Path(args.pretrained_checkpoint)


def persistent(args: Namespace, directory: Path) -> Selected | None:
    """Return the checkpoint that ``--ckpt-step`` or the tracker file of a directory names.

    Raises:
        UserError: the tracker file is damaged, or contradicts ``--ckpt-step``.
    """
    folder = release(directory)
    if folder is not None:
        require(
            not args.ckpt_step,
            f"--ckpt-step {args.ckpt_step}: Megatron-LM loads {folder} all the same, which "
            f"{TRACKER} names; write {args.ckpt_step} into that file instead",
        )
        return Selected(folder, None)
    latest = latest_iteration(directory)
    iteration = args.ckpt_step or latest
    if iteration is None:
        return None
    return Selected(iteration_directory(directory, iteration), iteration)


def newest(args: Namespace, directory: Path, saved: Selected | None) -> Selected | None:
    """Return the non-persistent checkpoint of a directory unless ``saved`` is of a later iteration.

    Raises:
        UserError: the tracker file of the non-persistent checkpoints is damaged.
    """
    if args.non_persistent_ckpt_type != "global":
        return saved
    folder = Path(args.non_persistent_global_ckpt_dir or directory / "non_persistent")
    iteration = latest_iteration(folder)
    if iteration is None or (saved is not None and iteration < (saved.iteration or 0)):
        return saved
    return Selected(iteration_directory(folder, iteration), iteration)


def selected(args: Namespace, directory: Path | None) -> Selected | None:
    """Return the checkpoint that Megatron-LM loads from a directory; None if it holds none."""
    if directory is None:
        return None
    return newest(args, directory, persistent(args, directory))
