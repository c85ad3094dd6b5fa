"""Output of commands: control characters of names are escaped, and streams may be closed."""

import ast
import errno
import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from rich.table import Table

from megatron_lowbit.console import plain_console, print_report
from megatron_lowbit.data.tokenizer import train_tokenizer
from megatron_lowbit.errors import UserError, as_user_error, exit_on_user_error, say

PACKAGE = Path(__file__).parents[1] / "megatron_lowbit"
HOSTILE = "a\x1b]0;title\x07\x1b[31mred\nnext\x9b\u202e"
ESCAPED = r"a\x1b]0;title\x07\x1b[31mred\nnext\x9b\u202e"
RUN = "import sys; from megatron_lowbit import commands; getattr(commands, sys.argv.pop(1))()"
MODEL = shlex.split("""
    --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1
    --global-batch-size 1 --vocab-size 512 --max-position-embeddings 64 --train-iters 1 --swiglu
""")


@pytest.fixture
def run(monkeypatch):
    """Function that runs a command's main as the installed command does; it returns the code."""

    def run(module: str, *arguments: object) -> int:
        main = import_module(f"megatron_lowbit.{module}").main
        with pytest.raises(SystemExit) as ended:
            exit_on_user_error(partial(main, list(map(str, arguments))))
        return ended.value.code

    return run


@pytest.fixture
def tokenizer(tmp_path):
    train_tokenizer(["some text"], 257, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize(
    "number", ["ENOENT", "EPERM", "EACCES", "ENOSPC", "EROFS", "ENOTDIR", "EISDIR", "ENAMETOOLONG"]
)
def test_a_path_or_a_disk_that_is_unfit_is_one_line(number, capsys):
    """Such as a folder that vanishes during a command."""
    code = getattr(errno, number)

    def main():
        raise OSError(code, os.strerror(code), "some/path")

    with pytest.raises(SystemExit) as ended:
        exit_on_user_error(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: some/path: {os.strerror(code)}\n"


def lines_of(capsys) -> list[str]:
    """Return the lines printed on both streams, which hold nothing that a terminal obeys."""
    lines = "".join(capsys.readouterr()).split("\n")
    assert all(line.isprintable() for line in lines), lines
    return lines


def test_the_functions_that_escape_are_those_that_print():
    """Other files call them; command_line.py prints help."""
    calls = {
        (node.func.id, str(file.relative_to(PACKAGE)))
        for file in PACKAGE.rglob("*.py")
        if re.search(r"\bprint|\bConsole", source := file.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    found = {call for call in calls if call[0] in ("print", "print_rank_0", "Console")}
    assert found == {("print", "errors.py"), ("print", "command_line.py")}


def test_lines_tables_and_streams_are_escaped(capsys):
    say(HOSTILE, "second", file=sys.stderr)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    print_report(HOSTILE, table)
    for stderr in (False, True):
        plain_console(200, stderr=stderr).print(HOSTILE, table)
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{ESCAPED}\nsecond\n")
    assert captured.out.count(r"a\x1b]0;title\x07\x1b[31mred") == 8
    assert not set(captured.out + captured.err) & set("\x1b\x07\x9b\u202e")


def test_names_of_text_files(run, tokenizer, tmp_path, capsys):
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / f"{HOSTILE}.bin").write_bytes(b"\xff")
    (folder / f"{HOSTILE}.txt").write_text("long text\n\n" * 24_000)
    (folder / os.fsdecode(b"\xfe.txt")).write_text("name without UTF-8")
    output = tmp_path / "out" / HOSTILE
    common = ("--input", folder)
    assert run("data.tokenizer", *common, "--vocab-size", 300, "--output", output) == 0
    assert any(ESCAPED in line and "tokens from" in line for line in lines_of(capsys))
    model = ("--tokenizer-model", tokenizer, "--output-prefix", output / HOSTILE)
    assert run("data.preprocess", *common, *model) == 0
    shown = lines_of(capsys)
    for words in ("documents", "skipped as not UTF-8", "split after paragraphs"):
        assert any(ESCAPED in line and words in line for line in shown), words


def test_special_tokens_of_a_tokenizer(run, tokenizer, tmp_path, capsys):
    file = tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    token = content["added_tokens"][0] | {"id": 257, "content": HOSTILE}
    content["added_tokens"].append(token)
    file.write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text(f"one {HOSTILE} two")
    arguments = ("--input", tmp_path / "text.txt", "--tokenizer-model", tokenizer)
    assert run("data.preprocess", *arguments, "--output-prefix", tmp_path / "out") == 0
    assert any(f"{ESCAPED} 1" in line for line in lines_of(capsys))


def test_names_of_checkpoints_recipes_and_runs(run, saved, tmp_path, capsys):
    folder = saved.rename(tmp_path / HOSTILE)
    for command in ("verify", "inspect"):
        assert run("checkpoints.command", command, folder) in (0, 2)
        assert any(ESCAPED in line for line in lines_of(capsys))
    recipe = tmp_path / f"{HOSTILE}.yaml"
    recipe.write_text((PACKAGE.parent / "recipes" / "nvfp4.yaml").read_text())
    run("recipes.command", "show", recipe, "--num-layers", 2)
    lines_of(capsys)
    study = ("--recipes", "bf16", recipe, "--output", folder, "--", *MODEL)
    run("study.command", "plan", *study)
    assert any(r"\x1b" in line for line in lines_of(capsys))


COMMANDS = [
    ("recipes.command", "list"),
    ("recipes.command", "show", "nvfp4", "--num-layers", "2"),
    ("planning.command", "--gpus", "1", *MODEL),
    ("study.command", "plan", "--recipes", "bf16", "nvfp4", "--output", "out", "--", *MODEL),
    ("checkpoints.command", "inspect", "saved"),
    ("checkpoints.command", "verify", "saved/iter_0000003"),
    ("data.tokenizer", "--input", "text.txt", "--vocab-size", "300", "--output", "t2"),
    (
        "data.preprocess", "--input", "text.txt", "--tokenizer-model", "tokenizer",
        "--output-prefix", "data",
    ),
    ("conversion.command", "to-megatron", "missing", "out"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_closed_streams(command, run, saved, tokenizer, tmp_path, monkeypatch, capsys):
    """Each command ends as with open ones."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text\n\n" * 3000)
    expected = run(*command)
    assert expected == (2 if command[-2] == "missing" else 0)
    with monkeypatch.context() as patch:
        for name in ("stdin", "stdout", "stderr"):
            patch.setattr(sys, name, None)
        assert run(*command) == expected


@pytest.mark.slow
def test_a_closed_standard_output_of_a_process(tmp_path):
    """Nothing is printed, least of all into a file that was opened later."""
    script = f"""
import sys
from megatron_lowbit.errors import exit_on_user_error
def main():
    with open({str(tmp_path / "file")!r}, "w") as file:
        assert file.fileno() > 2
        import os
        os.write(1, b"from C")
exit_on_user_error(main)
"""
    command = [sys.executable, "-c", script]
    shell = ["sh", "-c", '"$@" >&- 2>&- <&-', "sh", *command]
    assert subprocess.run(shell).returncode == 0
    assert (tmp_path / "file").read_bytes() == b""
    shell[-3:] = [sys.executable, "-c", RUN, "recipes", "list"]
    shell[2] = '"$@" >&-'
    result = subprocess.run(shell, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_generator_may_end_where_errors_are_turned_into_one_line():
    """A process that a signal ends closes the generators that wait for their next turn."""

    def texts():
        with as_user_error("cannot encode a text"):
            yield 1

    started = texts()
    next(started)
    started.close()
    started = texts()
    next(started)
    with pytest.raises(UserError, match=r"cannot encode a text \(ZeroDivisionError"):
        started.throw(ZeroDivisionError())
