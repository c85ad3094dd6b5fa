"""Output folder that is written file by file and renamed to its final name once complete.

Until then it is a hidden folder beside it, with a journal of its finished files. An interruption
(Ctrl-C, a kill, a full disk) leaves it there, and the same work started again makes only the rest.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rich.progress import Progress

from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import UserError, error_behind, require, say
from megatron_lowbit.json_files import as_object, is_inside, parse_json
from megatron_lowbit.storage import replacement

JOURNAL = ".finished.jsonl"
Span = tuple[int, int]
"""Place of a part in its file: first byte, number of bytes."""


class ResumableOutput:
    """Folder that is being written, with a journal of its finished files and a progress bar.

    Continues an interrupted ``task``, a JSON object, or begins with an empty folder.
    """

    def __init__(self, path: Path, task: dict[str, Any], parts: int) -> None:
        self.path, self.bar = path, Progress(console=plain_console(stderr=True))
        self._bar_task = self.bar.add_task("tensors", total=parts)
        self.finished = _finished(path, json.loads(json.dumps(task)))
        if self.finished is None:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            self.finished = {}
        # Write all lines again, since the last one may be torn.
        _write(path / JOURNAL, "w", task, *self.finished.values())

    def write(
        self,
        file: Path,
        parts: Sequence[Any],
        write_part: Callable[[BinaryIO, Any], None],
        head: bytes = b"",
    ) -> list[Span]:
        """Write a file of this folder part by part, unless it is finished.

        Args:
            file: the file's path.
            parts: content of the file.
            write_part: function that writes one of ``parts`` into the open file.
            head: bytes before the first part.

        Returns:
            The span of each part in the file.
        """
        name = str(file.relative_to(self.path))
        if name in self.finished:
            self.bar.advance(self._bar_task, len(parts))
        else:
            spans = []
            with open(file, "wb") as stream:
                stream.write(head)
                for part in parts:
                    start = stream.tell()
                    write_part(stream, part)
                    spans.append((start, stream.tell() - start))
                    self.bar.advance(self._bar_task)
                stream.flush()
                os.fsync(stream.fileno())
            self.finish(name, spans)
        return self.finished[name]["note"]

    def finish(self, name: str, spans: list[Span]) -> None:
        """Record that a file is written, and on the disk."""
        entry = {"file": name, "bytes": (self.path / name).stat().st_size, "note": spans}
        self.finished[name] = entry
        _write(self.path / JOURNAL, "a", entry)


@contextmanager
def resumable_output(
    output: Path, force: bool, task: dict[str, Any], parts: int
) -> Iterator[ResumableOutput]:
    """Provide a folder to write into, which becomes ``output`` if all goes well.

    After an interruption its finished files are kept for the next call with an equal ``task``,
    which names the source and every argument that decides on the files. Bad input leaves nothing.
    A bar on the terminal counts the ``parts`` of all files.

    Raises UserError where ``output`` exists, without ``force``, or the system refuses to read or
    write.
    """
    if replacement.restore_replaced(output):
        say(f"{output}: put back, since a killed conversion did not replace it")
    require(force or not output.exists(), f"{output} exists; --force replaces it")
    path = output.with_name(f".{output.name}.partial")
    try:
        partial = ResumableOutput(path, task, parts)
        if count := len(partial.finished):
            say(f"{output}: going on where it was interrupted, {count} files are there")
        with partial.bar:
            yield partial
        (path / JOURNAL).unlink()
        replacement.replace_directory(path, output)
    except KeyboardInterrupt:
        say(f"interrupted: {path} keeps the finished files for the same command")
        raise
    except Exception as error:
        cause = error_behind(error, OSError)  # torch.save hides it
        if cause is None or isinstance(error, UserError):
            shutil.rmtree(path, ignore_errors=True)
            raise
        raise UserError(
            f"{output}: stopped: {cause.strerror or cause}; the same command goes on from there"
        ) from error


def in_files(contents: Iterable[Any], most: int) -> list[list[Any]]:
    """Group contents by their ``nbytes`` into files of up to ``most`` bytes or one larger entry."""
    groups: list[list[Any]] = [[]]
    size = 0
    for content in contents:
        if groups[-1] and size + content.nbytes > most:
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
    finished = {}
    for line in lines:
        try:
            entry = as_object(parse_json(line, JOURNAL), JOURNAL)
        except UserError:
            break
        name = entry.get("file")
        file = path / name if is_inside(name) else None
        if file and file.is_file() and file.stat().st_size == entry.get("bytes"):
            finished[name] = entry
    for file in path.rglob("*"):
        if file.is_file() and str(file.relative_to(path)) not in finished:
            file.unlink()
    return finished


def _write(journal: Path, mode: str, *lines: dict[str, Any]) -> None:
    with open(journal, mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
