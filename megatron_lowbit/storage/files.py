"""The files of a checkpoint directory: their names, checksums, replacement and deletion.

    DIR/latest_checkpointed_iteration.txt    the newest iteration, decimal
    DIR/iter_0000100/...                     what Megatron-LM has saved
    DIR/iter_0000100/lowbit.json             length and checksum of each of these files
    DIR/.iter_0000100.replaced/...           an older one, while the iteration is saved anew
    DIR/.iter_0000100.deleted/...            one that is being deleted

Nothing here talks to other ranks.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries, as_object, is_inside, read_object
from megatron_lowbit.storage.pickles import check_lengths

TRACKER = "latest_checkpointed_iteration.txt"
DOCUMENT = "lowbit.json"
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
    if not tracker.exists():
        return None
    if not tracker.is_file():
        raise UserError(f"{tracker}: is no file")
    try:
        return tracker.read_text(errors="replace").strip()
    except OSError as error:
        raise UserError(f"{tracker}: cannot be read ({error.strerror})") from None


def iterations(directory: Path) -> list[int]:
    """Return the iterations that have a folder in DIR, complete or not, in ascending order."""
    numbers = [int(path.name[5:]) for path in directory.glob("iter_*") if _is_numbered(path)]
    return sorted(number for number in numbers if iteration_directory(directory, number).is_dir())


def complete_iterations(directory: Path) -> list[int]:
    """Return those whose files are all there in full length; their content is not read."""
    return [i for i in iterations(directory) if _is_complete(iteration_directory(directory, i))]


def last_saved(directory: Path) -> int | None:
    """Return the complete iteration of DIR that was written last; None where none is complete.

    It need not be the highest: a run that went back leaves higher ones of before.
    """

    def written(iteration: int) -> tuple[int, int]:
        return iteration_directory(directory, iteration).stat().st_mtime_ns, iteration

    return max(complete_iterations(directory), key=written, default=None)


def alternatives(directory: Path, besides: int | None = None) -> str:
    """Return the part of an error message that lists the complete checkpoints of DIR."""
    complete = [number for number in complete_iterations(directory) if number != besides]
    names = [iteration_directory(directory, number).name for number in complete[-_SHOWN:]]
    if not names:
        return "complete: none"
    more = ["..."] if len(complete) > _SHOWN else []
    return f"complete: {', '.join(more + names)}; --load-latest-valid goes back to a valid one"


# -- what a checkpoint should hold -----------------------------------------------------------------


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
    _replace_text(directory / DOCUMENT, json.dumps(content, indent=1))


def read_document(path: Path) -> dict[str, Any]:
    """Read lowbit.json of a checkpoint.

    Raises UserError if it is missing, damaged or of another version.
    """
    file = path / DOCUMENT
    if not path.is_dir():
        raise UserError(f"{path}: missing")
    if not file.is_file():
        raise UserError(f"{file}: missing")
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
        if not is_inside(name):
            raise UserError(f"{file}: files: {name}: not the name of a file in this folder")
    return document


def check_files(path: Path, files: dict[str, dict[str, Any]], names: Iterable[str]) -> None:
    """Raise UserError at the first of ``names`` that is not as lowbit.json's ``files`` says."""
    for name in names:
        file, expected = path / name, files[name]
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise UserError(f"{file}: {size} bytes instead of {expected['bytes']}")
            digest = _digest(file)
        except FileNotFoundError:
            raise UserError(f"{file}: missing") from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error
        if digest != expected["blake2b"]:
            raise UserError(f"{file}: its content differs from what was saved")


def _is_numbered(path: Path) -> bool:
    return re.fullmatch(r"iter_\d{7,}", path.name, re.ASCII) is not None


def _is_complete(path: Path) -> bool:
    try:
        if not (path / DOCUMENT).exists():
            check_lengths(path)
            return True
        files = read_document(path)["files"]
        return all((path / name).stat().st_size == files[name]["bytes"] for name in files)
    except (UserError, OSError):
        return False


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _document_digest(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# -- writing and deleting --------------------------------------------------------------------------


def write_tracker(directory: Path, iteration: int) -> None:
    """Let DIR's tracker file name an iteration."""
    _replace_text(directory / TRACKER, str(iteration))


def replace_directory(partial: Path, final: Path) -> None:
    """Let a directory appear under its name, in the place of one that is there.

    Killed between its two renames, it leaves the old one for :func:`restore_replaced`.
    """
    replaced = replaced_directory(final)
    _sync_directory(partial)
    if _is_there(final):
        os.rename(final, replaced)
    os.rename(partial, final)
    _sync_directory(final.parent)
    _remove(replaced)


def restore_replaced(final: Path) -> bool:
    """End what a killed :func:`replace_directory` has left; tell whether the old one is back.

    Where the new one is in its place, the old one is deleted.
    """
    replaced = replaced_directory(final)
    is_lost = _is_there(replaced) and not _is_there(final)
    if is_lost:
        os.rename(replaced, final)
        _sync_directory(final.parent)
    elif _is_there(replaced):
        _remove(replaced)
    return is_lost


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
        hidden = path.with_name(f".{path.name}.deleted")
        try:
            os.rename(path, hidden)
            _sync_directory(directory)
            shutil.rmtree(hidden)
        except OSError as error:
            print(f"cannot delete the older checkpoint {path}: {error.strerror}", flush=True)


def delete_hidden(directory: Path) -> None:
    """Delete what was moved out of DIR's checkpoints to be deleted, also by a killed run."""
    for hidden in directory.glob(".iter_*.deleted"):
        _remove(hidden)


# -- saving an iteration anew ----------------------------------------------------------------------
#
# Megatron-LM writes into the directory that is there. A kill would leave files of two checkpoints
# under one name, so that the old directory is set aside until the new one is complete.


def replaced_directory(path: Path) -> Path:
    """Return where a checkpoint's directory is while another takes its place."""
    return path.with_name(f".{path.name}.replaced")


def set_aside(path: Path) -> None:
    """Make room for a new checkpoint of an iteration that has one.

    Of two in a row the newer complete one is set aside. One that is incomplete stays where it is: a
    save that goes on in the background is about to complete it.
    """
    replaced = replaced_directory(path)
    if _is_there(replaced):
        if not is_replacement(path):
            return
        _remove(replaced)
    os.rename(path, replaced)
    _sync_directory(path.parent)


def is_replacement(path: Path) -> bool:
    """Tell whether the checkpoint that takes the place of the one set aside is complete."""
    if not any((path / name).is_file() for name in (METADATA, DOCUMENT)):
        return False
    # Megatron-LM's own formats end with METADATA, torch_dist with CONFIG after it.
    has_config = (path / CONFIG).is_file() or not (replaced_directory(path) / CONFIG).is_file()
    return has_config and _is_complete(path)


def discard_replaced(path: Path) -> None:
    """Move what was set aside for a checkpoint out of the way, for ``delete_hidden``."""
    hidden = path.with_name(f".{path.name}.deleted")
    if _is_there(hidden):
        _remove(hidden)
    os.rename(replaced_directory(path), hidden)


def settle_replaced(directory: Path) -> None:
    """End what a killed run has left of saving iterations anew: one checkpoint stays of each.

    It is the new one if that is complete, else the old one. No run may be saving into DIR.
    """
    for replaced in sorted(directory.glob(".iter_*.replaced")):
        path = replaced.with_name(replaced.name[1:].removesuffix(".replaced"))
        if is_replacement(path):
            discard_replaced(path)
            continue
        if _is_there(path):
            _remove(path)
        os.rename(replaced, path)
        _sync_directory(directory)
        print(f"{path}: put back, since a killed run did not finish its replacement", flush=True)
    delete_hidden(directory)


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


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
