"""tools/ under Megatron-LM's names: its arguments and file names, and errors for others."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import tokenizers
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lowbit.data.tokenizer import train_tokenizer

TOOLS = Path(__file__).parents[2] / "tools"
RECORDS = [{"text": f"record {i}, some words", "title": f"title {i}"} for i in range(20)]


@pytest.fixture
def run(monkeypatch, capsys):
    """Function that runs a tool and returns its exit code and what it wrote to stderr."""

    def run_tool(name: str, *words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(TOOLS / name), run_name="__main__")
        return int(end.value.code or 0), capsys.readouterr().err

    return run_tool


@pytest.fixture
def corpus(tmp_path):
    """Arguments of records and a tokenizer, in files of their own."""
    file, folder = tmp_path / "records.jsonl", tmp_path / "tokenizer"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    train_tokenizer(iter(record["text"] for record in RECORDS), 300, folder)
    return ["--input", file, "--tokenizer-model", folder, "--workers", 1]


@pytest.mark.parametrize("end", [True, False])
def test_each_key_of_the_records_is_a_dataset(run, corpus, tmp_path, end):
    words = [*corpus, "--output-prefix", tmp_path / "out", "--json-keys", "text", "title"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", *["--append-eod"] * end]
    assert run("preprocess_data.py", *words)[0] == 0
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    for key in ("text", "title"):
        dataset = IndexedDataset(str(tmp_path / f"out_{key}_document"))
        ids = [document.tolist() for document in dataset]
        texts = [tokenizer.decode(document[: len(document) - end]) for document in ids]
        assert texts == [record[key] for record in RECORDS]


def test_other_arguments_are_named(run, corpus, tmp_path):
    words = [*corpus, "--output-prefix", tmp_path / "out"]
    code, error = run("preprocess_data.py", *words, "--tokenizer-type", "GPT2BPETokenizer")
    assert code == 2 and "GPT2BPETokenizer" in error and "HuggingFaceTokenizer" in error
    code, error = run("preprocess_data.py", *words, "--split-sentences")
    assert code == 2 and "--split-sentences" in error
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_is_converted(run, tmp_path):
    (tmp_path / "model").mkdir()
    words = ["--model-type", "GPT", "--loader", "mixtral_hf", "--saver", "core",
             "--target-tensor-parallel-size", 2, "--load-dir", tmp_path / "model",
             "--save-dir", tmp_path / "out"]  # fmt: skip
    code, error = run("checkpoint/convert.py", *words)
    assert code == 2 and f"{tmp_path / 'model'}" in error and "config.json" in error
    code, error = run("checkpoint/convert.py", *words, "--tokenizer-model", tmp_path)
    assert code == 2 and "--tokenizer-model" in error and "--load-dir" in error
