"""Output folder that is written file by file and renamed to its final name once complete.

Until then it is a hidden folder beside it, with a journal of its finished files. An interruption
(Ctrl-C, a kill, a full disk) leaves it there, and the same work started again makes only the rest.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from megatron_lowbit.errors import UserError, error_behind, require
from megatron_lowbit.json_files import as_object, is_inside, parse_json
from megatron_lowbit.storage import replacement

JOURNAL = ".finished.jsonl"


class ResumableOutput:
    """Folder that is being written, with a note on each of its finished files."""

    def __init__(self, path: Path, task: dict[str, Any]) -> None:
        """Continue an interrupted task, a JSON object, or begin with an empty folder."""
        self.path, self._journal = path, path / JOURNAL
        self._finished = _finished(path, json.loads(json.dumps(task)))
        if self._finished is None:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            self._finished = {}
        # Write all lines again, since the last one may be torn.
        _write(self._journal, "w", task, *self._finished.values())

    def __len__(self) -> int:
        """Return the number of finished files."""
        return len(self._finished)

    def note(self, file: Path) -> Any:
        """Return the note on a file of this folder; None where the file is still to be made."""
        return self._finished.get(str(file.relative_to(self.path)), {}).get("note")

    def finish(self, file: Path, note: Any) -> None:
        """Record that a file is written, and on the disk. ``note`` is JSON, and not None."""
        name = str(file.relative_to(self.path))
        entry = {"file": name, "bytes": file.stat().st_size, "note": note}
        self._finished[name] = entry
        _write(self._journal, "a", entry)

    def close(self) -> None:
        """Remove the journal."""
        self._journal.unlink()


@contextmanager
def resumable_output(output: Path, force: bool, task: dict[str, Any]) -> Iterator[ResumableOutput]:
    """Provide a folder to write into, which becomes ``output`` if all goes well.

    After an interruption its finished files are kept for the next call with an equal ``task``,
    which names the source and every argument that decides on the files. Bad input leaves nothing.

    Raises UserError where ``output`` exists, without ``force``, or the system refuses to read or
    write.
    """
    if replacement.restore_replaced(output):
        print(f"{output}: put back, since a killed conversion did not replace it")
    require(force or not output.exists(), f"{output} exists; --force replaces it")
    path = output.with_name(f".{output.name}.partial")
    try:
        partial = ResumableOutput(path, task)
        if len(partial):
            print(f"{output}: going on where it was interrupted, {len(partial)} files are there")
        yield partial
        partial.close()
        replacement.replace_directory(path, output)
    except KeyboardInterrupt:
        print(f"interrupted: {path} keeps the finished files for the same command")
        raise
    except UserError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    except Exception as error:
        cause = error_behind(error, OSError)  # torch.save hides it
        if cause is None:
            shutil.rmtree(path, ignore_errors=True)
            raise
        raise UserError(
            f"{output}: stopped: {cause.strerror or cause}; the same command goes on from there"
        ) from error


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on the terminal; call what it provides for each tensor."""
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("tensors", total=total)
        yield lambda: bar.advance(task)


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
        lines = (path / JOURNAL).read_bytes().splitlines()
        if not lines or parse_json(lines[0], JOURNAL) != task:
            return None
    except (OSError, UserError):
        return None
    finished = {}
    for line in lines[1:]:
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
