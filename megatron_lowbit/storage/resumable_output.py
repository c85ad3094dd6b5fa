"""Output folder that is written file by file and renamed to its final name once complete.

Until then it is a hidden folder next to it, with a journal of its finished files. An interruption
(Ctrl-C, a kill, a full disk) leaves it there, and the same work started again makes only the rest.
One process at a time can write an output.
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from fnmatch import fnmatchcase
from os.path import lexists
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from rich.progress import Progress

from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import UserError, error_behind, require, say
from megatron_lowbit.folders import new_file, replace_text, sync_directory
from megatron_lowbit.json_files import as_object, is_inside, parse_json
from megatron_lowbit.storage import files
from megatron_lowbit.storage.lock import LOCK, FolderLock, output_lock

JOURNAL = ".finished.jsonl"
COMPANIONS = (
    "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*.jinja", "generation_config.json", "*.model",
)  # fmt: skip
"""Files other than weights that a converted folder keeps."""
_HUGGING_FACE = (
    "config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "hf_quant_config.json", "quantization_report.json", *COMPANIONS,
)  # fmt: skip
_ITERATION = (files.METADATA, files.CONFIG, files.DOCUMENT, "__0_*.distcp")
_WRITTEN = (
    LOCK, JOURNAL, *_HUGGING_FACE, files.TRACKER, "model.args",
    *(f"iter_*/{name}" for name in _ITERATION), *(f"hugging_face/{name}" for name in _HUGGING_FACE),
)  # fmt: skip
"""Files that conversions write: ``--force`` deletes no folder with others."""

Span = tuple[int, int]
"""Place of a part in its file: first byte, number of bytes."""


class ResumableOutput:
    """Folder that is being written, with a journal of its finished files and its progress.

    Continues an interrupted ``task``, a JSON object, or begins with an empty folder.
    """

    def __init__(self, path: Path, task: dict[str, Any] | None, parts: int) -> None:
        console = plain_console(stderr=True)
        self.path, self.bar = path, Progress(console=console, disable=not console.is_terminal)
        self.bar.add_task("tensors", total=parts)
        finished = None if task is None else _finished(path, json.loads(json.dumps(task)))
        if finished is None:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        self.finished = finished or {}
        # Write all lines again, since the last one may be torn.
        lines = map(json.dumps, (task, *self.finished.values()))
        replace_text(path / JOURNAL, "".join(f"{line}\n" for line in lines))

    def write(
        self,
        file: Path,
        parts: Sequence[Any],
        write_part: Callable[[BinaryIO, Any], None],
        head: bytes = b"",
    ) -> list[Span]:
        """Write a file of this folder part by part, unless it is finished; return each part's span.

        ``write_part`` writes one of ``parts`` into the open file, after the bytes of ``head``.
        """
        name = str(file.relative_to(self.path))
        if name in self.finished:
            self._advance(len(parts))
        else:
            spans = []
            with new_file(file) as stream:
                stream.write(head)
                for part in parts:
                    start = stream.tell()
                    write_part(stream, part)
                    spans.append((start, stream.tell() - start))
                    self._advance(1)
                stream.flush()
                os.fsync(stream.fileno())
                size = stream.tell()
            self.finish(name, spans, size)
        recorded: list[Span] = self.finished[name]["note"]
        return recorded

    def _advance(self, parts: int) -> None:
        """Move the bar; where it is not shown, in a log, print a line at each tenth."""
        (task,) = self.bar.tasks
        before = task.percentage // 10
        self.bar.advance(task.id, parts)
        if self.bar.disable and task.percentage // 10 > before:
            percent = int(task.percentage // 10 * 10)
            say(f"{percent}% of {task.total:.0f} tensors written", file=sys.stderr)

    def finish(self, name: str, spans: list[Span], size: int) -> None:
        """Record that a file of so many bytes is written, and on the disk."""
        self.finished[name] = {"file": name, "bytes": size, "note": spans}
        with open(self.path / JOURNAL, "a") as journal:
            journal.write(json.dumps(self.finished[name]) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

    def check_sizes(self) -> None:
        """Raise UserError unless all files are as long as what was written into them."""
        for name, entry in self.finished.items():
            size, length = (self.path / name).stat().st_size, entry["bytes"]
            require(size == length, f"{self.path / name}: {size} bytes instead of {length}")


@contextmanager
def resumable_output(
    output: Path, force: bool, task: dict[str, Any] | None, parts: int
) -> Iterator[ResumableOutput]:
    """Provide a folder to write into, which becomes ``output`` if all goes well.

    After an interruption its finished files are kept for the next call with an equal ``task``,
    which names the source and every argument that decides on the files. Bad input leaves nothing,
    as does every end before the last file without a ``task``.

    Raises UserError if ``output`` exists, without ``force``, is no model or checkpoint to replace,
    holds the source or is being written by another process, or if the system refuses to read or
    write.
    """
    require(output.name not in ("", ".."), f"{output}: not a name for a new folder")
    path = output.with_name(f".{output.name}.partial")
    source = None if task is None else Path(task["source"]).resolve()
    with ExitStack() as locks:
        _take(output, path, force, source, locks)
        try:
            partial = ResumableOutput(path, task, parts)
            if count := len(partial.finished):
                say(f"{output}: going on where it was interrupted, {count} files are there")
            with partial.bar:
                yield partial
            partial.check_sizes()
            if not force and lexists(output):
                raise FileExistsError(errno.EEXIST, "another process has made it meanwhile")
            replace_directory(path, output)
            (output / JOURNAL).unlink()  # Only now: it tells whose the hidden folder is.
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            known = interrupted or isinstance(error, UserError)
            cause = None if known else error_behind(error, OSError)  # torch.save hides it
            continues = task is not None and (interrupted or cause is not None)
            if not continues:
                shutil.rmtree(path, ignore_errors=True)
            elif isinstance(error, KeyboardInterrupt):
                say(f"interrupted: {path} keeps the finished files for the same command")
            if cause is None:
                raise
            advice = "; the same command goes on from there" if continues else ""
            raise UserError(f"{output}: stopped: {cause.strerror or cause}{advice}") from error


def _take(output: Path, path: Path, force: bool, source: Path | None, locks: ExitStack) -> None:
    """Lock an output and check that it, and the hidden folder, may be made or replaced."""
    locks.enter_context(closing(output_lock(output)))
    if restore_replaced(output):
        say(f"{output}: put back, since a killed conversion did not replace it")
    require(force or not lexists(output), f"{output} exists; --force replaces it")
    holds_source = source is not None and output.resolve() in (source, *source.parents)
    require(not holds_source, f"{output} holds the source")
    if lexists(output):
        check_replaceable(output)
    require(not _is_foreign(path), f"{output}: {path} is in the way; move it")
    if output.is_dir() and not output.is_symlink():
        locks.enter_context(closing(FolderLock(output, str(output))))


def check_replaceable(output: Path) -> None:
    """Raise UserError unless an output is an empty folder, or a model with files of conversions."""
    names = {entry.name for entry in output.iterdir()} - {LOCK} if output.is_dir() else {""}
    is_model = not names.isdisjoint({"config.json", files.TRACKER})
    message = f"{output} is no converted model or checkpoint, which --force replaces"
    require(not names or is_model, f"{message}; move it")
    if foreign := next(_foreign_entries(output), None):
        raise UserError(f"{message}: no conversion writes {foreign.relative_to(output)}; move it")


def _foreign_entries(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            # Only this project records the files of a checkpoint.
            if path.name.startswith("iter_") and not (path / files.DOCUMENT).is_file():
                yield path
        elif not any(_matches(path.relative_to(folder), pattern) for pattern in _WRITTEN):
            yield path


def _matches(path: PurePath, pattern: str) -> bool:
    """Match a path part by part, so that ``*`` stays within a folder."""
    parts, patterns = path.parts, pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def replace_directory(partial: Path, final: Path) -> None:
    """Rename a finished directory to its final name, replacing an older one.

    Killed between its two renames, it leaves the old one for :func:`restore_replaced`.
    """
    replaced = files.replaced_directory(final)
    sync_directory(partial)
    if lexists(final):
        os.rename(final, replaced)
    files.rename(partial, final)
    files.remove(replaced)


def restore_replaced(final: Path) -> bool:
    """Recover from a killed :func:`replace_directory`; return True if the old one is back.

    If the new one is already in its place, the old one is deleted instead.
    """
    replaced = files.replaced_directory(final)
    is_lost = lexists(replaced) and not lexists(final)
    if is_lost:
        files.rename(replaced, final)
    else:
        files.remove(replaced)
    return is_lost


def in_files(contents: Iterable[Any], limit: int) -> list[list[Any]]:
    """Group contents into files of up to ``limit`` bytes, or of one larger entry."""
    groups: list[list[Any]] = [[]]
    size = 0
    for content in contents:
        if groups[-1] and size + content.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(content)
        size += content.nbytes
    return groups


def _finished(path: Path, task: dict[str, Any]) -> dict[str, Any] | None:
    """Return the notes of an interrupted task's finished files; None for another task.

    Deletes all other files.
    """
    try:
        first, *lines = (path / JOURNAL).read_bytes().splitlines() or [b""]
        if parse_json(first, JOURNAL) != task:
            return None
    except (OSError, UserError):
        return None
    finished: dict[str, Any] = {}
    for line in lines:
        try:
            entry = as_object(parse_json(line, JOURNAL), JOURNAL)
        except UserError:
            break
        name: Any = entry.get("file")
        file = path / name if is_inside(name) else None
        if file and _is_plain(file) and file.stat().st_size == entry.get("bytes"):
            finished[name] = entry
    for file in path.rglob("*"):
        if file.is_symlink() or (file.is_file() and str(file.relative_to(path)) not in finished):
            file.unlink()
    return finished


def _is_plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _is_foreign(path: Path) -> bool:
    """Return True if a hidden folder's place is taken by something of another program."""
    if path.is_symlink() or not path.is_dir():
        return lexists(path)
    journals = {JOURNAL, f".{JOURNAL}.partial"}
    return not _is_plain(path / JOURNAL) and any(
        entry.name not in journals for entry in path.iterdir()
    )
