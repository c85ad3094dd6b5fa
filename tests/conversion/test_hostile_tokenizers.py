"""Tokenizer folders that no honest model has: each command reads them, or says why in one line."""

import json
import os
import random
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from test_gguf import write_model as write_llama

from megatron_lowbit.arguments.parse import parse_arguments
from megatron_lowbit.arguments.upstream import translate_tokenizer_errors
from megatron_lowbit.conversion.convert import to_megatron
from megatron_lowbit.conversion.gguf_file import to_gguf
from megatron_lowbit.data.tokenizer import load_tokenizer
from megatron_lowbit.errors import UserError

pytest.importorskip("gguf")
VALUES = [
    None, True, -1, 2**31 - 1, 2**63, 10**30, 1.5, float("nan"), "", "x", "\ud800x", "\x1b[31m", [],
    [5, {"a": 1}], {}, {"a": 1}, [[]], [["a"]], "a" * 10_000, [None], {"content": 5},
]  # fmt: skip
KEYS = ["\ud800x", "", "\0", "x" * 100]
CONTENTS = [
    b"", b"x", b"\xff\xfe", b"[]", b'"a"', b"null", b"{", b'{"a":' + b"[" * 3000, b"{{ 1/0 }}",
    b'{"chat_template":[{"name":1}]}', b'{"chat_template":{"a":1}}', b'{"eos_token":5}',
    b'{"auto_map":{"AutoTokenizer":["x.Y",null]}}', b'{"tokenizer_class":5}',
    b'{"tokenizer_class":"LlamaTokenizer"}', b"{% for x in %}",
]  # fmt: skip
FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
         "chat_template.jinja", "chat_template.json", "merges.txt", "vocab.json"]  # fmt: skip
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 100))]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_llama(folder)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    return folder


@pytest.fixture
def broken(source, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(source, tmp_path / "broken")


def start_training(folder: Path) -> None:
    """Build the tokenizer as a training run does."""
    from megatron.training import global_vars

    names = ("vocab_file", "merge_file", "chat_template", "special_tokens", "metadata_path",
             "tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens",
             "trust_remote_code", "pad_vocab_size")  # fmt: skip
    given = {"tokenizer_model": str(folder), "tokenizer_type": "HuggingFaceTokenizer"}
    with translate_tokenizer_errors():
        built = global_vars.build_tokenizer(Namespace(**dict.fromkeys(names), **given))
    built.eod, built.unique_identifiers  # noqa: B018
    assert built.vocab_size > 0


READERS = {
    "to-gguf": lambda folder: to_gguf(folder, folder.parent / "out.gguf"),
    "to-megatron": lambda folder: to_megatron(folder, folder.parent / "out"),
    "preprocess": lambda f: load_tokenizer("HuggingFaceTokenizer", str(f)).tokenize("a b"),
    "training": start_training,
}


def paths_of(document: Any, path: tuple = ()):
    """Yield the path of each entry, of long lists and objects of the first few."""
    yield path
    items = document.items() if isinstance(document, dict) else ()
    items = enumerate(document) if isinstance(document, list) else items
    for key, value in [*items][:12]:
        yield from paths_of(value, (*path, key))


def spoil(folder: Path, draw: random.Random) -> None:
    """Replace a file, or an entry of a JSON file."""
    file = folder / draw.choice(FILES[:2] * 4 + FILES)
    if draw.random() < 0.3 or not file.name.startswith(("tokenizer", "special")):
        file.write_bytes(draw.choice(CONTENTS))
        return
    document = json.loads(file.read_text()) if file.exists() else {"a": 1}
    *path, key = draw.choice([entry for entry in paths_of(document) if entry])
    holder = document
    for step in path:
        holder = holder[step]
    if draw.random() < 0.2:
        del holder[key]
    elif isinstance(holder, dict) and draw.random() < 0.2:
        holder[draw.choice(KEYS)] = draw.choice(VALUES)
    else:
        holder[key] = draw.choice(VALUES)
    file.write_text(json.dumps(document))


def read(broken: Path, reader: str) -> str | None:
    """Return the one line in which a command refuses a folder; None if it reads it."""
    before = {*broken.parent.iterdir()}
    try:
        READERS[reader](broken)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 900
        assert {*broken.parent.iterdir()} == before
        return str(error)
    return None


def test_a_tokenizer_that_is_too_large_for_memory(broken):
    os.truncate(broken / "tokenizer.json", 2**40)
    for read in (READERS["preprocess"], READERS["to-gguf"]):
        with pytest.raises(UserError, match=r"tokenizer\.json: has 1099511627776 bytes"):
            read(broken)


@pytest.mark.parametrize("seed", SEEDS)
def test_spoiled_tokenizers_are_read_or_refused_in_one_line(seed, broken):
    spoil(broken, random.Random(seed))
    for reader in READERS:
        read(broken, reader)


@pytest.mark.parametrize("reader", READERS)
def test_the_tokenizer_is_read_as_it_was_written(reader, broken):
    assert read(broken, reader) is None


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer.json", {"model.vocab": {"\ud800x": 5}}, "the text of a tokenizer cannot be"),
        ("tokenizer_config.json", {"chat_template": [{"name": 1}]}, "tokenizer cannot be read"),
        ("tokenizer_config.json", b"x", r"tokenizer cannot be read \(JSONDecodeError"),
        ("tokenizer.json", {"model.merges": [5, {"a": 1}]}, r"cannot be read \(ValueError"),
        ("config.json", {"vocab_size": 2**31 - 1}, "has 384 rows"),
        ("config.json", {"hidden_size": 2**30}, "config.json says 1073741824 input features"),
    ],
)
def test_files_that_llama_cpp_cannot_have(file, change, message, broken):
    """The last two would take all memory."""
    if isinstance(change, bytes):
        (broken / file).write_bytes(change)
    else:
        document = json.loads((broken / file).read_text())
        for path, value in change.items():
            *outer, key = path.split(".")
            holder = document[outer[0]] if outer else document
            holder[key] = holder[key] | value if isinstance(value, dict) else value
        (broken / file).write_text(json.dumps(document))
    refusal = read(broken, "to-gguf")
    assert refusal is not None and re.search(message, refusal)


def test_a_run_names_the_tokenizer_that_cannot_be_loaded(broken):
    (broken / "tokenizer_config.json").write_text('{"tokenizer_class": 5}')
    sizes = "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --lr 1e-3"
    data = "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 1 --mock-data"
    words = f"{sizes} {data} --tokenizer-type HuggingFaceTokenizer --tokenizer-model".split()
    with pytest.raises(UserError, match=r"^--tokenizer-model .*broken: cannot be loaded \(Val"):
        parse_arguments([*words, str(broken)], False)
