"""``lowbit-preprocess``: the dataset holds the tokens, or nothing is left."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lowbit.data import corpus as corpus_module
from megatron_lowbit.data import preprocess as preprocessing
from megatron_lowbit.data.dataset import data_digest
from megatron_lowbit.data.preprocess import main
from megatron_lowbit.data.tokenizer import load_tokenizer, train_tokenizer
from megatron_lowbit.errors import UserError

COMMAND = [sys.executable, "-c", "from megatron_lowbit.commands import preprocess; preprocess()"]
SUFFIXES = ("bin", "idx", "json")
TEXTS = [f"document {number}: " + "naïve words, again. " * (number % 7) for number in range(150)]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(TEXTS), 300, folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder):
    return load_tokenizer("HuggingFaceTokenizer", str(tokenizer_folder))


@pytest.fixture
def json_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    records = [{"text": text, "title": f"title {i}"} for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


@pytest.fixture
def preprocess(tokenizer_folder, tmp_path):
    def run(*inputs, options=(), prefix="out/data"):
        output = f"{tmp_path}/{prefix}"
        model = ["--tokenizer-model", str(tokenizer_folder), "--output-prefix", output]
        main(["--input", *map(str, inputs), *model, *options])
        return output

    return run


@pytest.fixture
def long_command(tmp_path, tokenizer_folder):
    """Starts a command that takes minutes; returns it, and its output folder, when it has begun."""

    def start(workers: int) -> tuple[subprocess.Popen, Path]:
        source, output = tmp_path / "long.jsonl", tmp_path / "out"
        source.write_text((json.dumps({"text": "many words " * 50}) + "\n") * 100_000)
        command = [*COMMAND, "--input", source, "--tokenizer-model", tokenizer_folder]
        command += ["--output-prefix", output / "data", "--workers", str(workers)]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            # A shell lets what it runs in the background ignore Ctrl-C: so may these tests.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        deadline = time.monotonic() + 120  # on a busy machine only the imports take 40 s
        while not any(file.stat().st_size for file in output.glob(".preprocess.*/*.bin")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return process, output

    return start


def documents(prefix):
    dataset = IndexedDataset(prefix)
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_each_line_is_a_document(preprocess, json_lines, tokenizer, capsys):
    prefix = preprocess(json_lines)
    expected = [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS]
    assert documents(prefix) == expected
    assert IndexedDataset(prefix).index.dtype == np.uint16
    tokens = sum(map(len, expected))
    assert json.loads(Path(prefix + ".json").read_text()) == {
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": 300,
        "documents": len(TEXTS),
        "tokens": tokens,
        "largest_id": max(map(max, expected)),
        "data_sha256": data_digest(Path(prefix + ".bin")),
        "index_sha256": data_digest(Path(prefix + ".idx")),
        "eod": tokenizer.eod,
    }
    ratio = sum(len(text.encode()) for text in TEXTS) / tokens
    line = f"{prefix}: 150 documents, {tokens:,} tokens, {ratio:.2f} bytes per token\n"
    assert capsys.readouterr().out == line
    assert sorted(os.listdir(Path(prefix).parent)) == ["data.bin", "data.idx", "data.json"]


@pytest.mark.parametrize("rows", [299, 300])
def test_ids_beyond_the_model_in_the_tokenizers_folder_are_reported(
    preprocess, json_lines, tokenizer_folder, tmp_path, capsys, rows
):
    """A folder of a Hugging Face model has its number of rows, which may lack added tokens."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows}))
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    json_lines.write_text(json.dumps({"text": model.decode([299])}))
    preprocess(json_lines, options=["--tokenizer-model", str(folder)])
    line = f"{folder}: token ids go up to 299, but the model has 299 rows"
    assert (line in capsys.readouterr().out) == (rows == 299)


def test_without_eod(preprocess, json_lines, tokenizer):
    prefix = preprocess(json_lines, options=["--no-append-eod"])
    assert documents(prefix) == [tokenizer.tokenize(text) for text in TEXTS]


def test_several_keys_give_a_dataset_each(preprocess, json_lines, tokenizer):
    prefix = preprocess(json_lines, options=["--json-keys", "title", "text"])
    assert tokenizer.detokenize(documents(prefix + "_title")[3][:-1]) == "title 3"
    assert tokenizer.detokenize(documents(prefix + "_text")[3][:-1]) == TEXTS[3]
    assert not Path(prefix + ".idx").exists()


def test_a_folder_is_read_in_order_without_the_undecodable(preprocess, tmp_path, tokenizer, capsys):
    folder = tmp_path / "folder"
    (folder / "site-packages").mkdir(parents=True)
    (folder / "b.py").write_bytes(b"second\r\n")
    (folder / "a.py").write_text("first")
    (folder / "c.txt").write_text("not python")
    (folder / "d.py").write_bytes(b"\xff\xff")
    (folder / "e.py").write_text("")
    (folder / "site-packages" / "f.py").write_text("excluded")
    options = ["--pattern", "*.py", "--exclude", "site-packages"]
    prefix = preprocess(folder, options=options)
    texts = [tokenizer.detokenize(ids[:-1]) for ids in documents(prefix)]
    assert texts == ["first", "second\r\n"]
    assert "skipped as not UTF-8 text: 1 files" in capsys.readouterr().out


@pytest.mark.parametrize("sidecar", [True, False])
def test_datasets_in_the_folder_are_no_text(preprocess, tmp_path, sidecar):
    """The command repeated gives the same dataset; an interrupted one has left its folder, too."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "text.txt").write_text(PARAGRAPH * 20)
    first = documents(preprocess(folder, prefix="folder/text.data"))
    assert len(first) == 3
    if sidecar:
        (folder / "text.data.idx").unlink()
    else:
        for suffix in (".bin", ".idx"):
            (folder / f"text.data{suffix}").rename(folder / f"other{suffix}")
    (folder / ".preprocess.other").mkdir()
    (folder / ".preprocess.other" / "other.bin").write_text("text")
    assert documents(preprocess(folder, prefix="folder/text.data")) == first


PARAGRAPH = "A sentence of some words, and another one.\n" * 40 + "\n"  # 1721 characters


def test_one_text_file_is_split_after_paragraphs(preprocess, tmp_path, tokenizer, capsys):
    path = tmp_path / "book.txt"
    path.write_text(PARAGRAPH * 20)
    texts = [tokenizer.detokenize(ids[:-1]) for ids in documents(preprocess(path))]
    assert texts == [PARAGRAPH * 9, PARAGRAPH * 9, PARAGRAPH * 2]
    message = "split after paragraphs into documents of at most 16,384 characters: "
    assert f"{message}{path}\n" in capsys.readouterr().out


def test_of_several_files_long_ones_are_split(preprocess, tmp_path, tokenizer, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(PARAGRAPH * 170)
    (folder / "b.txt").write_text(PARAGRAPH * 150)
    texts = [tokenizer.detokenize(ids[:-1]) for ids in documents(preprocess(folder))]
    assert texts == [PARAGRAPH * 9] * 18 + [PARAGRAPH * 8, PARAGRAPH * 150]
    assert f"16,384 characters: {folder / 'a.txt'}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("short", [5]),
        ("", [0]),
        ("x" * 16_384, [16_384]),
        ("x" * 20_000, [16_384, 20_000]),
        ("\n\n" + "x" * 20_000, [2, 16_386, 20_002]),
        ("x\r\n\r\n" + "word\n" * 4_000, [5, 16_385, 20_005]),
        ("two words\n" + "x" * 20_000, [10, 16_394, 20_010]),
        ("two " + "ü" * 20_000, [4, 16_388, 20_004]),
    ],
)
def test_ends_of_pieces(text, ends):
    """A piece ends a paragraph, else a line, else a word, else it is as long as can be."""
    pieces = list(corpus_module._split(text))
    assert "".join(pieces) == text
    assert list(accumulate(map(len, pieces))) == ends


@pytest.mark.parametrize("batch", [64, 7])
def test_workers_do_not_change_the_files(preprocess, json_lines, batch, monkeypatch):
    monkeypatch.setattr(preprocessing, "_BATCH_DOCUMENTS", batch)
    one = preprocess(json_lines, prefix="one/data")
    two = preprocess(json_lines, prefix="two/data", options=["--workers", "2"])
    for suffix in (".bin", ".idx", ".json"):
        assert Path(one + suffix).read_bytes() == Path(two + suffix).read_bytes()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": "a"}\n{"text": }\n', [], r"in.jsonl:2: not valid JSON"),
        ('{"text": ""}\n', [], r"--input holds no document with text"),
        ('{"text": "a"}\n', ["--workers", "0"], r"--workers 0: at least 1"),
        ('{"text": "a"}\n', ["--json-keys", "text", "text"], r"each key once"),
    ],
)
def test_bad_lines_leave_no_dataset(preprocess, tmp_path, content, options, message):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        preprocess(path, options=options)
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


def test_bad_arguments(preprocess, tmp_path, json_lines):
    with pytest.raises(UserError, match=r"--input .*/missing: no such file or folder"):
        preprocess(tmp_path / "missing")
    with pytest.raises(UserError, match=r"no file matches --pattern '\*.rs'"):
        preprocess(tmp_path, options=["--pattern", "*.rs"])
    for options in (["--pattern", "*.rs"], ["--exclude", "x"]):
        with pytest.raises(UserError, match=r"--pattern .* and --exclude need a folder as --input"):
            preprocess(json_lines, options=options)
    for again in (json_lines, json_lines.parent, json_lines.parent / "." / json_lines.name):
        with pytest.raises(UserError, match=rf"{json_lines} is among them 2 times; give it once"):
            preprocess(json_lines, options=["--input", str(json_lines), str(again)])
    with pytest.raises(UserError, match="argument --output-prefix: the name is empty"):
        preprocess(json_lines, options=["--output-prefix", ""])
    binary = tmp_path / "b.txt"
    binary.write_bytes(b"\xff\xff")
    with pytest.raises(UserError, match=r"--input .*b.txt: not UTF-8 text"):
        preprocess(binary)
    binary.write_text("text")
    with pytest.raises(UserError, match=r"there is no tokenizer.json in this folder"):
        preprocess(json_lines, options=["--tokenizer-model", str(tmp_path)])


def test_parts_of_a_folder_that_are_not_read_are_refused(preprocess, tmp_path, monkeypatch):
    """A link to a folder, which may be endless, and a folder that this user may not read."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"--input .*a/link is a link to a folder; give it to"):
        preprocess(tmp_path / "a")
    with pytest.raises(UserError, match="no file matches"):
        preprocess(tmp_path / "a", options=["--exclude", "link"])
    (tmp_path / "a" / "link").unlink()
    listed = os.scandir

    def scandir(path):
        if os.path.basename(path) == "b":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"--input .*a/b: Permission denied"):
        preprocess(tmp_path / "a")


def test_places_that_cannot_be_written_to(preprocess, tmp_path, json_lines):
    (tmp_path / "taken.idx").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    for prefix, options, message in (
        ("in.jsonl/data", [], "in.jsonl is a file, not a folder"),
        ("taken", [], "taken.idx is a folder, not a file"),
        ("n" * 252, [], "File name too long"),
        *[(name, [], "a name of files, not a folder") for name in ("folder/", ".", "..")],
        ("data", ["--json-keys", "text", "a/b"], "no name for a file next to"),
        ("data", ["--workers", "99999"], "--workers 99999: at least 1 and at most"),
    ):
        with pytest.raises(UserError, match=message):
            preprocess(json_lines, prefix=prefix, options=options)
    with pytest.raises(UserError, match=r"--input n+: File name too long"):
        preprocess("n" * 256)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_leaves_no_dataset(preprocess, json_lines, workers, tmp_path, file_limit):
    with file_limit(1000), pytest.raises(UserError, match=r"data: cannot be written \(File too"):
        preprocess(json_lines, options=["--workers", workers])
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failure_leaves_the_former_dataset(preprocess, json_lines, workers, monkeypatch):
    prefix = preprocess(json_lines)
    before = {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()}

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(preprocessing, "_write_sidecar", fail)
    with pytest.raises(KeyboardInterrupt):
        preprocess(json_lines, options=["--no-append-eod", "--workers", workers])
    assert {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()} == before


@pytest.mark.parametrize("suffix", [".json", ".bin", ".idx"])
def test_files_of_others_are_not_replaced(preprocess, tmp_path, json_lines, suffix):
    """PREFIX.json may be the text itself."""
    file = tmp_path / f"in{suffix}"
    file.write_text('{"text": "mine"}\n')
    message = f"--output-prefix .*in: {file} exists and is not of lowbit-preprocess"
    with pytest.raises(UserError, match=message):
        preprocess(json_lines, prefix="in")
    assert file.read_text() == '{"text": "mine"}\n'
    assert {path.name for path in tmp_path.iterdir()} == {file.name, json_lines.name}


def test_one_command_at_a_time_writes_a_prefix(preprocess, tmp_path, json_lines):
    """Folders of commands that were killed are deleted, and others' are not."""
    killed, foreign = tmp_path / "out/.preprocess.other", tmp_path / "out/.preprocess.mine"
    foreign.mkdir(parents=True)
    (foreign / "notes").write_text("notes")
    killed.mkdir()
    (killed / ".lock").write_text("")
    (killed / "other.bin").write_text("half")
    hold = (
        "import sys; from pathlib import Path; from megatron_lowbit.storage.lock import *\n"
        "with temporary_folder(Path(sys.argv[1]), 'place'): print(flush=True); input()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / "out" / ".preprocess.data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(UserError, match=f"data: in use by process {other.pid} on"):
            preprocess(json_lines)
        preprocess(json_lines, prefix="out/third")
        assert (tmp_path / "out" / ".preprocess.data").is_dir()
        other.kill()
    assert (tmp_path / "out" / ".preprocess.data").is_dir()
    preprocess(json_lines)
    left = {path.name for path in (tmp_path / "out").iterdir() if path.suffix[1:] not in SUFFIXES}
    assert left == {".preprocess.mine"} and (foreign / "notes").read_text() == "notes"
    with pytest.raises(UserError, match=r"\.preprocess\.mine is in the way; move it"):
        preprocess(json_lines, prefix="out/mine")


def test_a_folder_of_another_user_is_left(preprocess, tmp_path, json_lines, monkeypatch):
    (tmp_path / "out" / ".preprocess.theirs").mkdir(parents=True)
    opened = os.open

    def of_another_user(path, *arguments, **settings):
        if ".preprocess.theirs" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **settings)

    (tmp_path / "out" / ".preprocess.theirs" / ".lock").write_text("")
    monkeypatch.setattr(os, "open", of_another_user)
    preprocess(json_lines)
    assert (tmp_path / "out" / "data.idx").is_file()
    assert (tmp_path / "out" / ".preprocess.theirs" / ".lock").is_file()


def processes_of_group(leader: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            found += [int(stat.parent.name)] * (int(group) == leader and state != "Z")
    return found


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
def test_an_ended_command_leaves_no_worker_and_no_file(long_command, number, workers):
    """The signal reaches only the command, as in a container or a batch system."""
    process, output = long_command(workers)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)  # at the end of the workers, which have the pipe
    assert (process.returncode, errors) == (143 if number == signal.SIGTERM else -9, b"")
    deadline = time.monotonic() + 60
    while processes_of_group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)  # a worker closes the pipe before it ends
    assert processes_of_group(process.pid) == [] and os.listdir(output) == []


@pytest.mark.slow
def test_a_worker_that_the_system_ends_is_one_line(long_command):
    process, output = long_command(2)
    while len(workers := set(processes_of_group(process.pid)) - {process.pid}) < 2:
        time.sleep(0.05)
    os.kill(max(workers), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and errors.startswith(b"error: --workers 2: the system ended")
    assert errors.count(b"\n") == 1 and os.listdir(output) == []


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(long_command):
    process, output = long_command(2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    _, errors = process.communicate(timeout=60)  # workers end the batch that they are at
    assert (process.returncode, errors) == (130, b"interrupted\n")
    assert os.listdir(output) == []
