"""Loading tokenizers: what the data pipeline reads of them, and what is refused."""

import hashlib
import json

import pytest

from megatron_lowbit.data.tokenizer import load_tokenizer, padded_vocab_size, train_tokenizer
from megatron_lowbit.errors import UserError


@pytest.fixture
def folder(tmp_path):
    train_tokenizer(iter(["some words, some more words, and others"] * 3), 270, tmp_path / "tok")
    return tmp_path / "tok"


def load(folder):
    return load_tokenizer("HuggingFaceTokenizer", str(folder), None)


def test_attributes(folder):
    tokenizer = load(folder)
    assert tokenizer.vocab_size == 270
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"
    assert tokenizer.pad == -1
    assert tokenizer.sha256 == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert json.loads(json.dumps(tokenizer.unique_identifiers))["sha256"] == tokenizer.sha256
    assert str(folder) not in json.dumps(tokenizer.unique_identifiers)


@pytest.mark.parametrize("eos", ["w", {"content": "w", "lstrip": False}])
def test_eod_is_the_eos_token_of_the_configuration(folder, eos):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load(folder).detokenize([load(folder).eod]) == "w"


def test_eod_without_a_configuration(folder):
    (folder / "tokenizer_config.json").unlink()
    assert load(folder).detokenize([load(folder).eod]) == "<|endoftext|>"


def test_nothing_is_added_or_cut(folder):
    model = json.loads((folder / "tokenizer.json").read_text())
    model["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    model["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(model))
    tokenizer = load(folder)
    assert tokenizer.detokenize(tokenizer.tokenize("zebra crossing")) == "zebra crossing"


def test_null_tokenizer():
    tokenizer = load_tokenizer("NullTokenizer", None, 100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.sha256) == (101, 100, None)
    assert tokenizer.tokenize("3 14 15") == [3, 14, 15]
    assert tokenizer.detokenize([3, 14]) == "3 14"


def test_refused(folder, tmp_path):
    with pytest.raises(
        UserError, match=r"--tokenizer-type Foo: choose one of HuggingFaceTokenizer"
    ):
        load_tokenizer("Foo", None, None)
    with pytest.raises(UserError, match=r"--vocab-size: NullTokenizer needs"):
        load_tokenizer("NullTokenizer", None, None)
    with pytest.raises(UserError, match=r"--tokenizer-model: give the folder"):
        load_tokenizer("HuggingFaceTokenizer", None, None)
    with pytest.raises(UserError, match=r"there is no tokenizer.json"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"--vocab-size 5: the tokenizer in .* has 270"):
        load_tokenizer("HuggingFaceTokenizer", str(folder), 5)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(UserError, match=r"end-of-document token '</s>' is not in the vocabulary"):
        load(folder)
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"tokenizer_config.json: not valid JSON"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json: not a tokenizer"):
        load(folder)


@pytest.mark.parametrize(
    ("size", "divisible_by", "tp_size", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (256, 128, 2, 256), (1, 1, 1, 1)],
)
def test_padded_vocab_size(size, divisible_by, tp_size, padded):
    assert padded_vocab_size(size, divisible_by, tp_size) == padded


def changed(folder, **entries):
    """Change tokenizer.json; return the folder."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


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
