"""A conversion that was interrupted goes on where it stopped."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial as bind
from pathlib import Path

import pytest
import torch
from small_llama import write_llama

from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.gguf_file import to_gguf
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.errors import UserError
from megatron_lowbit.storage.lock import FolderLock
from megatron_lowbit.storage.resumable_output import JOURNAL, ResumableOutput

DIRECTIONS = ("to-megatron", "to-hugging-face")
FINISHED = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """``source`` and ``there``, the same model in both formats."""
    folder = tmp_path_factory.mktemp("resume")
    write_llama(folder / "source", shard_bytes=20_000)
    to_megatron(folder / "source", folder / "there")
    return folder


def conversion(folder: Path, direction: str) -> Callable[..., object]:
    """Take the output, and the most bytes of a file."""
    if direction == "to-megatron":
        return lambda output, limit=9_000: to_megatron(folder / "source", output, file_bytes=limit)
    convert = bind(to_hugging_face, folder / "there")
    return lambda output, limit=9_000: convert(output, shard_bytes=limit)


def stop(patch: pytest.MonkeyPatch, how: Callable[[], None]) -> None:
    """Call ``how`` when one file more is written, but not yet known to be finished."""
    finish, count = ResumableOutput.finish, iter(range(FINISHED + 1))

    def finish_or_stop(self, *rest):
        if next(count, None) == FINISHED:
            how()
        finish(self, *rest)

    patch.setattr(ResumableOutput, "finish", finish_or_stop)


def raising(error: BaseException) -> Callable[[], None]:
    def throw() -> None:
        raise error

    return throw


def signalled(convert: Callable[[Path], object], output: Path, number: int) -> int:
    """Convert in a process that gets a signal in the middle; return the process."""
    child = os.fork()
    if child == 0:
        stop(pytest.MonkeyPatch(), lambda: os.kill(os.getpid(), number))
        try:
            convert(output)
        finally:
            os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    return child


def killed(convert: Callable[[Path], object], output: Path) -> Path:
    """Convert in a process that is killed in the middle; return the folder it leaves."""
    signalled(convert, output, signal.SIGKILL)
    assert not output.exists()
    return output.with_name(f".{output.name}.partial")


def noted(partial: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of change of the files that the journal has."""
    lines = (partial / JOURNAL).read_text().splitlines()[1:]
    stats = {name: (partial / name).stat() for name in (json.loads(line)["file"] for line in lines)}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def files(folder: Path) -> dict[str, bytes]:
    """Return content by name, but for the number that torch draws for its ``.metadata``."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".metadata", "lowbit.json")
    }


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_killed_conversion_goes_on(folder, tmp_path, direction, capsys):
    """The output is what one go makes; files that were finished stay as they are."""
    convert = conversion(folder, direction)
    convert(tmp_path / "whole")
    partial = killed(convert, tmp_path / "out")
    before = noted(partial)
    assert len(before) == FINISHED
    with open(partial / JOURNAL, "a") as journal:
        journal.write('{"file": "torn')
    capsys.readouterr()
    convert(tmp_path / "out")
    assert f"going on where it was interrupted, {FINISHED} files" in capsys.readouterr().out
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert len(files(tmp_path / "out")) > FINISHED + 2
    stats = {name: (tmp_path / "out" / name).stat() for name in before}
    assert {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    back = to_hugging_face if direction == "to-megatron" else to_megatron
    back(tmp_path / "out", tmp_path / "back")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_arguments_start_again(folder, tmp_path, direction, capsys):
    convert = conversion(folder, direction)
    killed(convert, tmp_path / "out")
    convert(tmp_path / "out", 30_000)
    assert "going on" not in capsys.readouterr().out
    convert(tmp_path / "whole", 30_000)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_another_source_starts_again(folder, tmp_path, capsys):
    """The same folder, too, once it has other content."""
    shutil.copytree(folder / "source", tmp_path / "source")
    convert = conversion(tmp_path, "to-megatron")
    killed(convert, tmp_path / "out")
    torch.manual_seed(1)
    write_llama(tmp_path / "source", shard_bytes=20_000)
    convert(tmp_path / "out")
    assert "going on" not in capsys.readouterr().out


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_write_that_fails(folder, tmp_path, direction, file_limit):
    """In one line, though torch.save hides what the system said; and it goes on."""
    convert = conversion(folder, direction)
    stopped = pytest.raises(UserError, match="stopped: File too large; the same command")
    with file_limit(10_000), stopped as caught:
        convert(tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1
    convert(tmp_path / "out")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_files_that_an_error_leaves(folder, tmp_path, direction, capsys):
    """Ctrl-C and a full disk: the finished files. Bad input: nothing."""
    convert = conversion(folder, direction)
    for error, seen, kept in (
        (KeyboardInterrupt(), KeyboardInterrupt, FINISHED),
        (OSError(28, "No space left on device"), UserError, FINISHED),
        (UserError("bad input"), UserError, 0),
    ):
        with pytest.MonkeyPatch.context() as patch:
            stop(patch, raising(error))
            with pytest.raises(seen) as caught:
                convert(tmp_path / "out")
        partial = tmp_path / ".out.partial"
        assert (len(noted(partial)) if partial.exists() else 0) == kept
        if isinstance(error, OSError):
            assert "No space left on device; the same command goes on" in str(caught.value)
        shutil.rmtree(partial, ignore_errors=True)
    assert ".out.partial keeps the finished files" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rename", [1, 2])
def test_a_kill_while_the_output_is_replaced(folder, tmp_path, rename, capsys):
    """Before each of the two renames: the old output is there again at the next start."""
    output = tmp_path / "out"
    to_megatron(folder / "source", output)
    (output / "hugging_face" / "tokenizer.old").write_text("")
    child = os.fork()
    if child == 0:
        renamed, count = os.rename, iter(range(1, 3))

        def kill_or_rename(*names):
            if output in names and next(count) == rename:
                os.kill(os.getpid(), signal.SIGKILL)
            renamed(*names)

        pytest.MonkeyPatch().setattr(os, "rename", kill_or_rename)
        to_megatron(folder / "source", output, force=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert output.exists() == (rename == 1)
    with pytest.raises(UserError, match="out exists; --force replaces it"):
        to_megatron(folder / "source", output)
    assert ("put back" in capsys.readouterr().out) == (rename == 2)
    assert (output / "hugging_face" / "tokenizer.old").exists()
    to_megatron(folder / "source", output, force=True)
    assert not (output / "hugging_face" / "tokenizer.old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "line",
    ["7", "[]", '{"file": 7}', '{"file": "../x", "bytes": 0}', '{"file": "a\\u0000"}', "[" * 10**5],
)
def test_a_damaged_journal(folder, tmp_path, line):
    """Lines that are no entries end it; the files that they should name are made again."""
    convert = conversion(folder, "to-megatron")
    partial = killed(convert, tmp_path / "out")
    (partial / JOURNAL).write_text((partial / JOURNAL).read_text() + line + "\n")
    convert(tmp_path / "out")
    convert(tmp_path / "whole")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_conversion_at_a_time_writes_an_output(folder, tmp_path, direction):
    """The first one, stopped in a file, goes on undisturbed."""
    convert = conversion(folder, direction)
    convert(tmp_path / "whole")
    child = signalled(convert, tmp_path / "out", signal.SIGSTOP)
    before = noted(tmp_path / ".out.partial")
    with pytest.raises(UserError, match=f"out: in use by process {child} on .*; end that run"):
        convert(tmp_path / "out")
    assert noted(tmp_path / ".out.partial") == before
    os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_folder_that_a_run_saves_into_is_not_replaced(folder, tmp_path):
    (tmp_path / "out").mkdir()
    child = os.fork()
    if child == 0:
        FolderLock(tmp_path / "out")
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    with pytest.raises(UserError, match=f"out: in use by process {child}"):
        to_megatron(folder / "source", tmp_path / "out", force=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    to_megatron(folder / "source", tmp_path / "out", force=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_file_that_is_shorter_than_what_was_written(folder, tmp_path, direction):
    convert = conversion(folder, direction)
    suffix = "distcp" if direction == "to-megatron" else "safetensors"

    def cut() -> None:
        file = next((tmp_path / ".out.partial").rglob(f"*.{suffix}"))
        os.truncate(file, 10)

    with pytest.MonkeyPatch.context() as patch:
        stop(patch, cut)
        with pytest.raises(UserError, match=rf"\.{suffix}: 10 bytes instead of \d+"):
            convert(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_comes_meanwhile_is_not_replaced(folder, tmp_path):
    convert = conversion(folder, "to-megatron")
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, (tmp_path / "out").mkdir)
        with pytest.raises(UserError, match="out: stopped: another process has made it meanwhile"):
            convert(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "out").rmdir()
    convert(tmp_path / "out")


def test_outputs_that_would_delete_something_else(folder, tmp_path):
    shutil.copytree(folder / "source", tmp_path / "models" / "source")
    source = tmp_path / "models" / "source"
    for output in (source, tmp_path / "models", tmp_path / "models" / ".." / "models"):
        with pytest.raises(UserError, match=f"{output} holds the source"):
            to_megatron(source, output, force=True)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis").write_text("text")
    with pytest.raises(UserError, match=r"out: .*\.out\.partial is in the way; move it"):
        to_megatron(source, tmp_path / "out")
    with pytest.raises(UserError, match=r"^\.: not a name for a new folder"):
        to_megatron(source, Path("."), force=True)
    assert (tmp_path / ".out.partial" / "thesis").read_text() == "text"
    assert sorted(os.listdir(tmp_path)) == [".out.partial", "models"]


def test_force_replaces_only_models_and_checkpoints(folder, tmp_path):
    """No run, no iteration of a checkpoint such as the source, no folder of models, and no file."""
    run, models, text = tmp_path / "run", tmp_path / "models", tmp_path / "text"
    shutil.copytree(folder / "there", run)
    (run / "metrics.jsonl").touch()
    shutil.copytree(folder / "source", models / "source")
    text.touch()
    before = sorted(tmp_path.rglob("*"))
    for output in (run, run / "iter_0000000", models, text):
        for convert in (bind(to_hugging_face, run), bind(to_megatron, folder / "source")):
            with pytest.raises(UserError, match=f"{output} (is no converted model|holds the sou)"):
                convert(output, force=True)
    assert sorted(tmp_path.rglob("*")) == before


FOREIGN = {
    "a clone": ("model", "pytorch_model.bin"), "its git folder": ("model", ".git/HEAD"),
    "a run": ("there", "metrics.jsonl"), "logs": ("there", "tensorboard/events.out"),
    "an optimizer": ("there", "iter_0000000/__1_0.distcp"),
    "notes": ("there", "hugging_face/notes/config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_force_replaces_no_folder_with_a_file_of_another_program(case, folder, tmp_path):
    """The same folder without the file is replaced."""
    kind, name = FOREIGN[case]
    output, back = tmp_path / "out", bind(to_hugging_face, folder / "there")
    back(output) if kind == "model" else shutil.copytree(folder / "there", output)
    foreign = output / name
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text("precious")
    with pytest.raises(UserError, match=f"--force replaces: no conversion writes {name}; move it"):
        back(output, force=True)
    assert foreign.read_text() == "precious"
    foreign.unlink()
    back(output, force=True)


def test_force_replaces_all_files_of_a_quantized_export(folder, tmp_path):
    for _ in range(2):
        to_hugging_face(folder / "there", tmp_path / "out", shard_bytes=9_000, force=True,
                        quantized=QuantizedAs("modelopt", ["qat-nvfp4"]))  # fmt: skip
    assert {"hf_quant_config.json", "quantization_report.json"} < set(os.listdir(tmp_path / "out"))


def test_force_does_not_replace_a_run_of_stock_megatron_lm(folder, tmp_path):
    """Its checkpoints have no lowbit.json."""
    shutil.copytree(folder / "there", tmp_path / "run")
    shutil.copytree(folder / "there" / "iter_0000000", tmp_path / "run" / "iter_0000100")
    (tmp_path / "run" / "iter_0000100" / "lowbit.json").unlink()
    with pytest.raises(UserError, match="no conversion writes iter_0000100; move it"):
        to_hugging_face(folder / "there", tmp_path / "run", force=True)


TEMPLATE = "additional_chat_templates/rag.jinja"
COMPANION = ("tokenizer.json", "tokenizer.secret", "chat_template.jinja", "config.json", TEMPLATE)


@pytest.mark.parametrize("name", COMPANION)
@pytest.mark.parametrize("command", ["to-megatron", "to-hugging-face", "--carry", "to-gguf"])
def test_links_out_of_the_source_are_not_copied(folder, tmp_path, command, name):
    """A conversion would publish what they point to."""
    source = tmp_path / "source"
    shutil.copytree(folder / ("there" if command == "to-hugging-face" else "source"), source)
    file = source / "hugging_face" / name if command == "to-hugging-face" else source / name
    secret = tmp_path / "secret"
    secret.write_text(file.read_text() if file.exists() else "{}")
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    file.symlink_to(secret)
    convert = {
        "to-megatron": to_megatron, "to-hugging-face": to_hugging_face, "to-gguf": to_gguf,
        "--carry": lambda _, out: to_hugging_face(folder / "there", out, companions=source),
    }[command]  # fmt: skip
    with pytest.raises(UserError, match=f"{file}: a link out of this folder is not followed"):
        convert(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["secret", "source"]


def test_an_iteration_has_the_companions_of_its_checkpoint(folder, tmp_path):
    shutil.copytree(folder / "there", tmp_path / "there")
    (tmp_path / "there" / "hugging_face" / "tokenizer_config.json").write_text("{}")
    to_hugging_face(tmp_path / "there" / "iter_0000000", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer_config.json").read_text() == "{}"


def test_links_of_hugging_faces_cache_are_followed(folder, tmp_path):
    """A model's files are links into ``blobs`` there."""
    model = tmp_path / "models--a--b"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "rev").mkdir(parents=True)
    for file in (folder / "source").iterdir():
        shutil.copy(file, model / "blobs" / f"digest-of-{file.name}")
        (model / "snapshots" / "rev" / file.name).symlink_to(f"../../blobs/digest-of-{file.name}")
    (model / "blobs" / "t").write_text("{}")
    (model / "snapshots" / "rev" / "tokenizer_config.json").symlink_to("../../blobs/t")
    (model / "snapshots" / "rev" / TEMPLATE).parent.mkdir()
    (model / "snapshots" / "rev" / TEMPLATE).symlink_to("../../../blobs/t")
    to_megatron(model / "snapshots" / "rev", tmp_path / "there")
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    for folder in (tmp_path / "there" / "hugging_face", tmp_path / "back"):
        for copied in (folder / "tokenizer_config.json", folder / TEMPLATE):
            assert copied.read_text() == "{}" and not copied.is_symlink()
