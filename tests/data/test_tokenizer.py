"""Tokenizers: what the data pipeline reads of them, and what ``lowbit-tokenizer`` writes."""

import hashlib
import json
import os

import pytest

from megatron_lowbit.data.preprocess import preprocess
from megatron_lowbit.data.tokenizer import load_tokenizer, main, train_tokenizer
from megatron_lowbit.errors import UserError


@pytest.fixture
def folder(tmp_path):
    train_tokenizer(iter(["some words, some more words, and others"] * 3), 270, tmp_path / "tok")
    return tmp_path / "tok"


def load(folder):
    return load_tokenizer("HuggingFaceTokenizer", str(folder))


def changed(folder, **entries):
    """Change tokenizer.json; return the folder."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


def test_attributes(folder):
    tokenizer = load(folder)
    assert tokenizer.vocab_size == 270
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"
    assert tokenizer.sha256 == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("eos", ["w", {"content": "w", "lstrip": False}, None])
def test_eod_is_the_eos_token_of_the_configuration(folder, eos):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({"eos_token": eos})) if eos else file.unlink()
    assert load(folder).detokenize([load(folder).eod]) == ("w" if eos else "<|endoftext|>")


def test_nothing_is_added_or_cut(folder):
    model = json.loads((folder / "tokenizer.json").read_text())
    end, first, second = "<|endoftext|>", *({"id": x, "type_id": i} for i, x in enumerate("AB"))
    model["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                           "stride": 0}  # fmt: skip
    model["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": first}],
        "pair": [{"Sequence": first}, {"Sequence": second}],
        "special_tokens": {end: {"id": end, "ids": [0], "tokens": [end]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(model))
    tokenizer = load(folder)
    assert tokenizer.detokenize(tokenizer.tokenize("zebra crossing")) == "zebra crossing"


def test_refused(folder, tmp_path):
    for tokenizer_type, model, message in (
        ("Foo", None, "--tokenizer-type Foo: choose HuggingFaceTokenizer"),
        ("HuggingFaceTokenizer", None, "--tokenizer-model: give the folder"),
        ("HuggingFaceTokenizer", str(tmp_path), "there is no tokenizer.json"),
    ):
        with pytest.raises(UserError, match=message):
            load_tokenizer(tokenizer_type, model)
    for name, content, message in (
        ("tokenizer_config.json", '{"eos_token": "</s>"}',
         "end-of-document token '</s>' is not in the vocabulary"),
        ("tokenizer_config.json", "[", r"tokenizer_config.json: not valid JSON"),
        ("tokenizer.json", "{}", r"tokenizer.json: not a tokenizer"),
    ):  # fmt: skip
        (folder / name).write_text(content)
        with pytest.raises(UserError, match=message):
            load(folder)


def test_configurations_of_other_types(folder):
    for eos, message in (
        (7, r"eos_token 7: must be a string"),
        ([], r"eos_token \[\]: must be a string"),
        ({}, r"eos_token: needs the entry 'content'"),
        ({"content": ["w"]}, r"eos_token: content \['w'\]: must be a string"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        with pytest.raises(UserError, match=message):
            load(folder)
    for content in (b"[]", b"[" * 10**5, b"\xff{}", b'{"a": 1, "a": 2}'):
        (folder / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer_config\.json: (not valid|holds no) JSON"):
            load(folder)


def test_panics_of_the_library_are_one_line(folder):
    """It is written in Rust, whose panics are no Exceptions in Python."""
    slow = {"type": "Split", "pattern": {"Regex": "(w|ww)+$"}, "behavior": "Isolated",
            "invert": False}  # fmt: skip
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot encode a text \("):
        load(changed(folder, pre_tokenizer=slow)).tokenize("w" * 60 + "x")
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer of the .* library \("):
        load(changed(folder, normalizer=broken))


def test_ids_that_no_dataset_can_hold(folder):
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"]["w"] = 2**32 - 1
    with pytest.raises(UserError, match=r"has the token id 4294967295; ids are below 2147483647"):
        load(changed(folder, model=model))


# -- lowbit-tokenizer ------------------------------------------------------------------------------

# Every byte that UTF-8 can hold, spaces at the ends, line endings, joined emoji, the special token.
TEXTS = (
    "",
    "def f(x):\n    return x + 1\n",
    "  two  spaces , a comma ! \r\n\ttab \x00 \x7f",
    "naïve Ångström 你好 👩‍👩‍👧 e\u0301 \ufeff \uffff \U0010ffff",
    "".join(map(chr, range(0x800))),
    "before<|endoftext|>after",
)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "tests").mkdir(parents=True)
    for number in range(8):
        (folder / f"m{number}.py").write_text(
            f"def function_{number}(value, other):\n    return value + other  # sum\n"
        )
    (folder / "notes.txt").write_text("zzzzqqqq " * 200)
    (folder / "tests" / "t.py").write_text("zzzzqqqq " * 200)
    (folder / "binary.py").write_bytes(b"\xff\xfe\x00")
    return folder


def train(corpus, output, *options):
    main(["--input", str(corpus), "--vocab-size", "290", "--output", str(output), *options])


def test_auto_tokenizer_gives_the_same_ids_and_round_trips(corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    train(corpus, tmp_path / "tok")
    ours = load(tmp_path / "tok")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tok")
    assert len(theirs) == ours.vocab_size == 290
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eod
    for text in TEXTS:
        ids = ours.tokenize(text)
        assert theirs(text).input_ids == ids
        assert ours.detokenize(ids) == text
        assert theirs.decode(ids) == text


def test_pattern_and_exclude_choose_the_files(corpus, tmp_path, capsys):
    train(corpus, tmp_path / "all")
    assert "skipped as not UTF-8 text: 1 files" in capsys.readouterr().out
    train(corpus, tmp_path / "python", "--pattern", "*.py", "--exclude", "tests")
    python, everything = (load(tmp_path / name) for name in ("python", "all"))
    assert len(everything.tokenize("zzzzqqqq")) < len(python.tokenize("zzzzqqqq")) == 8


def test_the_same_files_give_the_same_tokenizer(corpus, tmp_path):
    train(corpus, tmp_path / "a")
    train(corpus, tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_tokenizer_in_a_folder_of_text_is_no_text(corpus, tmp_path):
    """Neither a former one that is replaced, nor the one of a dataset."""
    train(corpus, tmp_path / "a")
    for _ in range(2):
        train(corpus, corpus / "tok")
        assert load(corpus / "tok").sha256 == load(tmp_path / "a").sha256
    preprocess([corpus], corpus / "tok", str(tmp_path / "inside"))
    preprocess([corpus], tmp_path / "a", str(tmp_path / "outside"), exclude=["tok"])
    assert (tmp_path / "inside.bin").read_bytes() == (tmp_path / "outside.bin").read_bytes()


def test_json_lines_are_read_by_key(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"body": "hello hello hello"}) + "\n")
    train(path, tmp_path / "tok", "--json-keys", "body")
    tokenizer = load(tmp_path / "tok")
    assert len(tokenizer.tokenize("hello")) == 1


def test_a_small_corpus_is_reported(corpus, tmp_path, capsys):
    main(
        ["--input", str(corpus / "m0.py"), "--vocab-size", "5000", "--output", str(tmp_path / "t")]
    )
    assert "too few different pairs for --vocab-size 5,000" in capsys.readouterr().out


def test_bad_input_is_refused_and_leaves_nothing(corpus, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(UserError, match=r"broken.jsonl:2: not valid JSON"):
        train(broken, tmp_path / "tok")
    for size in (256, 10**12):
        with pytest.raises(
            UserError, match=f"--vocab-size {size}: at least 257 .*, at most 4194304"
        ):
            train(corpus, tmp_path / "tok", "--vocab-size", str(size))
    broken.write_text('{"text": ""}\n\n')
    with pytest.raises(UserError, match=r"--input .*broken.jsonl: holds no text"):
        train(broken, tmp_path / "tok")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "corpus"]


def test_places_that_cannot_be_written_to(corpus, tmp_path, file_limit):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "tokenizer.json").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for name, message in (
        ("file", "is a file, not a folder"),
        ("file/below", "Not a directory"),
        ("taken", "tokenizer.json is a folder, not a file"),
        ("n" * 256, "File name too long"),
        ("missing/" + "n" * 256, "a name is longer than 255 bytes"),
    ):
        with pytest.raises(UserError, match=message):
            train(corpus, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    with file_limit(1000), pytest.raises(UserError, match=r"tok: cannot be written \(File too"):
        train(corpus, tmp_path / "tok")
    assert os.listdir(tmp_path / "tok") == []
    train(corpus, tmp_path / ("n" * 255))


def test_a_tokenizer_of_another_program_is_not_replaced(corpus, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
        with pytest.raises(UserError, match=r"\.json exists and is not of lowbit-tokenizer"):
            train(corpus, tmp_path / name)
        assert os.listdir(tmp_path / name) == ["tokenizer.json"]
    train(corpus, tmp_path / "own")
    train(corpus, tmp_path / "own", "--pattern", "*.py")
