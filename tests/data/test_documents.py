"""Documents by the content of files: JSON records or text, whatever the name and compression."""

import bz2
import gzip
import json
import lzma
import sys

import pytest
from backports import zstd

from megatron_lowbit.data.corpus import Corpus
from megatron_lowbit.data.preprocess import preprocess
from megatron_lowbit.data.tokenizer import load_tokenizer, train_tokenizer
from megatron_lowbit.errors import UserError

RECORDS = [{"text": "The quick brown fox", "id": 1}, {"id": "2", "text": "jumps\nover the dög"}]
TEXTS = [record["text"] for record in RECORDS]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
COMPRESSED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}
# A frame of Zstandard without data, such as pzstd writes first.
SKIPPED = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"


def read(*inputs, keys=None):
    return [list(document.texts) for document in Corpus(inputs, keys, "*", []).documents()]


@pytest.fixture
def written(tmp_path):
    """Function that writes a file of a name, in a folder of its own; it returns the file."""

    def write(name, content):
        path = tmp_path / "texts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "my-corpus.json", "a.ndjson", "A.JSONL", "a.jsonlines", "a.txt", "a", "a.JSON"],
)
@pytest.mark.parametrize(
    "content",
    [
        LINES,
        "\n \n" + LINES.replace("\n", "\r\n\n"),
        "\ufeff" + LINES,
        LINES.removesuffix("\n"),
        LINES.replace("{", " {  ", 1),
    ],
)
def test_json_lines_of_any_name(written, name, content):
    path = written(name, content)
    assert read(path) == read(path.parent) == [[text] for text in TEXTS]


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.JSON"])
@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"separators": (",", ":")}])
def test_arrays_and_single_objects(written, name, layout):
    path = written(name, json.dumps(RECORDS, **layout))
    assert read(path) == read(path.parent) == [[text] for text in TEXTS]
    more = [record | {"title": str(number)} for number, record in enumerate(RECORDS)]
    path.write_text(json.dumps(more, **layout))
    assert read(path, keys=["title", "text"]) == [["0", TEXTS[0]], ["1", TEXTS[1]]]
    path.write_text(json.dumps(RECORDS[0], **layout))
    assert read(path) == read(path.parent) == [TEXTS[:1]]


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("name", ["a.jsonl.{}", "a.json.{}", "a.{}", "a"])
def test_compressed_records(written, name, suffix):
    """Whatever the name, of one stream or several."""
    compress = COMPRESSED[suffix]
    path = written(name.format(suffix), compress(LINES.encode()))
    assert read(path) == read(path.parent) == [[text] for text in TEXTS]
    path.write_bytes(b"".join(compress(line.encode()) for line in LINES.splitlines(True)))
    assert read(path) == [[text] for text in TEXTS]
    path.write_bytes(compress(json.dumps(RECORDS).encode()))
    if "jsonl" not in name:
        assert read(path) == [[text] for text in TEXTS]


def test_frames_of_pzstd_and_compressed_text(written):
    path = written("a.zst", SKIPPED + zstd.compress(LINES.encode()))
    assert read(path) == [[text] for text in TEXTS]
    assert read(written("b.txt.gz", gzip.compress(b"plain text"))) == [["plain text"]]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_damaged_compressed_files(written, suffix):
    """Cut anywhere, or with other bytes: an error that names the file, never less data."""
    whole = COMPRESSED[suffix](LINES.encode() * 50)
    for content in (whole[:-1], whole[: len(whole) // 2], whole[:11], whole[:20] + b"\0" * 20):
        path = written(f"a.jsonl.{suffix}", content)
        with pytest.raises(UserError, match=rf"a.jsonl.{suffix}: .*(damaged|cannot be read|valid)"):
            read(path)


def test_a_missing_reader_is_named(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    path = written("a.zst", zstd.compress(b"text"))
    with pytest.raises(UserError, match=r"a\.zst: decompress it, or .*pip install backports\.zstd"):
        read(path)


def test_small_files_of_much_text_are_refused(written, monkeypatch):
    monkeypatch.setattr("megatron_lowbit.data.corpus._MOST_BYTES", 1000)
    with pytest.raises(UserError, match=r"a\.gz: decompresses to a text of more than"):
        read(written("a.gz", gzip.compress(b"x" * 2000)))
    with pytest.raises(UserError, match=r"a\.jsonl:1: longer than"):
        read(written("a.jsonl", json.dumps({"text": "x" * 1000})))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"body": "x"}\n{"body": "y"}\n', r"a\.json:1: key 'text' is missing.*body"),
        ("a.json", '{"text": "x"}\n{"body": "y"}\n', r"a\.json:2: key 'text' is missing"),
        ("a.json", '{"text": "x",}\n{"text": "y"}\n', r"a\.json:1: not valid JSON"),
        ("a.json", '{"text": "x"}\n{"text": "y"\n', r"a\.json:2: not valid JSON"),
        ("a.txt", '{"text": "x"}\n[1]\n', r"a\.txt:2: a JSON object is expected, not list"),
        ("a.json", '[{"body": "x"}]', r"a\.json: entry 1: key 'text' is missing"),
        ("a.json", '[{"text": "x"}, 3]', r"a\.json: entry 2: a JSON object is expected, not int"),
        ("a.json", '[{"text": "x"}, {"te', r"a\.json: not valid JSON"),
        ("a.json", '{\n"text": "x"\n}\n{\n"text": "y"\n}', r"a\.json: not valid JSON \(Extra data"),
        ("a.json", '{"text": ["x", "y"]}', r"a\.json: key 'text' must hold a string, not list"),
        ("a.jsonl", "plain text", r"a\.jsonl:1: not valid JSON"),
        ("a.jsonl", '{"text": "a"}\n\n[1]\n', r"a\.jsonl:3: a JSON object is expected, not list"),
        ("a.jsonl", "[" * 10**5, r"a\.jsonl:1: not valid JSON"),
        ("a.jsonl", '{"id": ' + "9" * 5000 + "}", r"a\.jsonl:1: not valid JSON"),
        ("a.jsonl", '{"text": "a", "text": "b"}', r"not valid JSON \(a second key 'text'\)"),
        ("a.jsonl", '{"text": "\\ud800"}', r"a\.jsonl:1: key 'text' holds a lone surrogate"),
        ("a.jsonl", '{"' + "b" * 1000 + '": 1}', r"key 'text' is missing; there are  ?\.\.\.$"),
    ],
)
def test_damaged_records_of_any_name(written, name, content, message):
    path = written(name, content)
    for source in (path, path.parent):
        with pytest.raises(UserError, match=message):
            read(source)


@pytest.mark.parametrize(
    "content", ['{"name": "x"}', '{\n "name": "x"\n}', '["x", "y"]', "[1]", "x"]
)
def test_json_that_holds_no_records(written, content):
    """Named itself, a file is refused; among the files of a folder it is a text like the others."""
    path = written("a.json", content)
    written("b.txt", "text")
    assert read(path.parent) == [[content], ["text"]]
    with pytest.raises(UserError, match=r"a\.json: "):
        read(path)


@pytest.mark.parametrize(
    "content",
    ["[link](x)\n[b]: y", "[section]\nkey = 1\n", "{ text }\n{ text }\n", "{", "[\n{a: 1}]"],
)
def test_text_that_begins_like_json(written, content):
    assert read(written("a.txt", content)) == [[content]]


def test_keys_need_records(written):
    path = written("a.txt", "text")
    (path.parent / "b.jsonl").write_text(LINES)
    assert read(path.parent) == [["text"], *([text] for text in TEXTS)]
    for source in (path, path.parent):
        with pytest.raises(UserError, match=r"a\.txt: .* --json-keys text does not apply"):
            read(source, keys=["text"])
    path.write_text("")
    assert read(path.parent, keys=["text"]) == [[text] for text in TEXTS]


def test_the_source_of_a_dataset_is_text(written):
    written("a.json", json.dumps(RECORDS))
    written("a.idx", b"MMIDIDX\0\0")
    written("a.bin", "text")
    assert read(written("b.bin", "text").parent) == [*([text] for text in TEXTS), ["text"]]


def test_files_with_nul_bytes_are_no_text(written):
    path = written("a.tgz", gzip.compress(b"name" + bytes(253) + b"ustar\x0000" + b"text"))
    written("a.utf16", "text".encode("utf-16-le"))
    written("b.txt", "text")
    assert read(path.parent) == [["text"]]
    with pytest.raises(UserError, match=r"--input .*a\.tgz: not UTF-8 text"):
        read(path)


@pytest.mark.parametrize("workers", [1, 2])
def test_special_tokens_in_the_text_are_counted(written, tmp_path, capsys, workers):
    train_tokenizer(["some text"], 257, tmp_path / "tokenizer")
    eod = load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer")).eod
    texts = ["a<|endoftext|>b<|endoftext|>", "no <|endoftext", "<|endoftext|>"] * 40
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    tokenizer, output = str(tmp_path / "tokenizer"), str(tmp_path / "out")
    preprocess([written("a.jsonl", lines)], tokenizer, output, workers=workers)
    ids = (tmp_path / "out.bin").read_bytes()
    assert memoryview(ids).cast("H").tolist().count(eod) == 120 + 120
    line = "special tokens written in the texts, which training reads as such: <|endoftext|> 120\n"
    assert line in capsys.readouterr().out
    preprocess([written("b.txt", "plain")], tokenizer, output)
    assert "special tokens" not in capsys.readouterr().out


def test_progress_adds_up_to_the_stored_bytes(written):
    """Also of compressed files, of arrays and of text in pieces."""
    written("a.jsonl.gz", gzip.compress(LINES.encode() * 1000))
    written("b.json", json.dumps(RECORDS))
    written("c.txt", "word " * 100_000)
    path = written("d.jsonl", LINES)
    corpus = Corpus([path.parent], None, "*", [])
    stored = sum(file.stat().st_size for file in corpus.files)
    assert sum(document.source_bytes for document in corpus.documents()) == pytest.approx(stored)
