"""Datasets of a run: their tokens, and refusals of datasets that are too small."""

import json
import os
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from megatron_lowbit.data.dataset import data_digest
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import forward_step
from megatron_lowbit.megatron.forward_step import _check_ids

# isort: split
from megatron.training import get_args

RUN = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --lr 1
    --tokenizer-type NullTokenizer --vocab-size 1000
"""


@pytest.fixture
def prefix(write_dataset, tmp_path) -> str:
    """A dataset of 39 documents, no two of which have an id in common."""
    return write_dataset(tmp_path / "data", (25,) * 39)


@pytest.fixture
def datasets(build_datasets):
    return lambda line, *samples: build_datasets(f"{RUN} {line}", samples)


def tokens(dataset) -> set[int]:
    return {int(token) for number in range(len(dataset)) for token in dataset[number]["tokens"]}


def test_samples_are_the_tokens(datasets, prefix, tmp_path):
    train, valid, test = datasets(f"--data-path {prefix} --split 80,10,10", 40, 3, 3)
    assert len(train) >= 40 and len(valid) >= 3 and len(test) >= 3
    sample = train[0]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    # Consecutive ids within a document: at most one jump, where two documents meet.
    assert ((sample["labels"] - sample["tokens"]) != 1).sum() <= 1
    seen = [tokens(part) for part in (train, valid, test)]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    assert list((tmp_path / "cache").rglob("*.npy"))


def next_batch(loaded: dict) -> dict:
    get_args().curr_iteration = 0
    return forward_step._next_batch(iter([loaded]), None)


def test_attention_stays_within_documents(datasets, prefix):
    """Documents begin at multiples of 25, the only ids that follow another document's."""
    line = f"--data-path {prefix} --split 1,0,0 --dataloader-inter-document-masking"
    train, _, _ = datasets(f"{line} --seq-length 64 --max-position-embeddings 64", 12, 0, 0)
    loaded = default_collate([train[number] for number in range(2)])
    batch = next_batch(loaded)
    tokens = batch["tokens"][0]
    assert torch.equal(tokens, loaded["tokens"].flatten())
    starts = [i for i, token in enumerate(tokens.tolist()) if token % 25 == 0 or i % 64 == 0]
    packed = forward_step._documents(batch, trains=False)["packed_seq_params"]
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [*starts, 128]
    assert len(starts) > 4 and packed.qkv_format == "thd"
    longest = max(b - a for a, b in pairwise([*starts, 128]))
    assert packed.max_seqlen_q == packed.max_seqlen_kv == longest
    positions = [i - max(x for x in starts if x <= i) for i in range(128)]
    assert batch["position_ids"].tolist() == [positions]


def test_documents_are_padded(datasets, prefix):
    """All documents have 25 tokens: those that begin within a sample begin at multiples of 8."""
    line = f"--data-path {prefix} --split 1,0,0 --dataloader-inter-document-masking"
    line += " --pad-documents-to-multiple-of 8 --seq-length 64 --max-position-embeddings 64"
    train, _, _ = datasets(line, 12, 0, 0)
    loaded = default_collate([train[0]])
    batch = next_batch(loaded)
    boundaries = loaded["cu_seqlens"][0].unique().tolist()
    lengths = [-(b - a) // 8 * -8 for a, b in pairwise(boundaries)]
    packed = forward_step._documents(batch, trains=False)["packed_seq_params"]
    assert packed.cu_seqlens_q.tolist() == [0, *(min(64, end) for end in accumulate(lengths))]
    padding = batch["tokens"][0] == 0
    assert padding.sum() > 0 and batch["loss_mask"][0][padding].sum() == 0


def test_a_batch_without_masks_has_no_documents(datasets, prefix):
    train, _, _ = datasets(f"--data-path {prefix} --split 1,0,0", 12, 0, 0)
    batch = next_batch(default_collate([train[0]]))
    assert forward_step._documents(batch, trains=True) == {}


def test_the_cache_is_where_it_is_asked_for(datasets, prefix, tmp_path):
    datasets(f"--data-path {prefix} --split 1,0,0 --data-cache-path {tmp_path / 'here'}", 3, 0, 0)
    assert list((tmp_path / "here").rglob("*.npy")) and not (tmp_path / "cache").exists()


def test_a_blend_keeps_the_weights(datasets, write_dataset, tmp_path):
    documents = (25,) * 19
    low = write_dataset(tmp_path / "low", documents)
    high = write_dataset(tmp_path / "high", documents, first_token=500)
    train, _, _ = datasets(f"--data-path 3 {low} 1 {high} --split 1,0,0", 40, 0, 0)
    first = [int(train[number]["tokens"][0]) for number in range(40)]
    assert sum(token >= 500 for token in first) == 10


@pytest.mark.parametrize(
    ("split", "samples", "part"),
    [
        ("99,1,0", (1, 1, 0), "validation part has 0 of 39 documents"),
        ("1,0,99", (1, 0, 1), "training part has 0 of 39 documents"),
        ("80,19.9,0.1", (1, 1, 1), "test part has 0 of 39 documents"),
    ],
)
def test_a_part_without_documents_is_refused(datasets, prefix, split, samples, part):
    """Megatron-LM would count its epochs in an endless loop."""
    with pytest.raises(UserError, match=part):
        datasets(f"--data-path {prefix} --split {split}", *samples)


def test_a_part_without_documents_is_left_out_where_no_sample_is_needed(datasets, prefix):
    train, valid, test = datasets(f"--data-path {prefix} --split 99,1,0", 40, 0, 0)
    assert len(train) >= 40 and valid is test is None


def test_each_dataset_of_a_blend_is_checked(datasets, prefix, write_dataset, tmp_path):
    small = write_dataset(tmp_path / "small", (25, 25))
    with pytest.raises(UserError, match=f"{small}: the validation part has 0 of 2 documents"):
        datasets(f"--data-path 1 {prefix} 1 {small} --split 90,10,0", 1, 1, 0)


@pytest.mark.parametrize(
    ("line", "samples", "epochs"),
    [
        ("--data-path {0} --split 1,0,0", 10**9, "1.64e\\+07"),
        ("--data-path 1 {0} 3 {0} --split 1,0,0", 10**7, "4.1e\\+04"),
        ("--train-data-path {0}", 10**9, "1.64e\\+07"),
    ],
)
def test_data_that_would_be_read_too_often(datasets, prefix, monkeypatch, line, samples, epochs):
    """Megatron-LM counts the epochs one by one, and lists all their documents."""
    if samples < 10**9:  # few enough epochs, were there memory for their documents
        machine = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 4.1e4 * 39 * 16 - 1}
        monkeypatch.setattr(os, "sysconf", machine.get)
    message = f"{prefix}: the training part has 39 documents and 975 tokens, which the run would "
    with pytest.raises(UserError, match=f"{message}read {epochs} times"):
        datasets(f"{line.format(prefix)}", samples, 0, 0)


def test_datasets_without_weights_are_read_once(datasets, prefix):
    train, _, _ = datasets(f"--data-path {prefix} {prefix} --split 1,0,0", 10**9, 0, 0)
    assert len(train) == 2 * ((975 - 1) // 16)


@pytest.fixture
def short(write_dataset, tmp_path) -> str:
    """Dataset of one document with 10 tokens, fewer than the 17 of one sample."""
    return write_dataset(tmp_path / "short", (10,))


@pytest.mark.parametrize(
    ("train", "valid", "test", "part"),
    [
        ("short", "long", "long", "train-data-path {}: the training"),
        ("long", "short", "long", "valid-data-path {}: the validation"),
        ("long", "1 long 1 short", "long", "valid-data-path {}: the validation"),
        ("long", "long", "short", "test-data-path {}: the test"),
    ],
)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_part_with_its_own_dataset_without_a_sample_is_refused(
    datasets, prefix, short, tmp_path, in_a_file, train, valid, test, part
):
    named = {"train": train, "valid": valid, "test": test}
    named = {k: v.replace("long", prefix).replace("short", short) for k, v in named.items()}
    line = " ".join(f"--{name}-data-path {given}" for name, given in named.items())
    if in_a_file:
        (tmp_path / "parts.json").write_text(json.dumps(named))
        line = f"--per-split-data-args-path {tmp_path / 'parts.json'}"
        part = "per-split-data-args-path" + part[part.index(" ") :]
    message = f"^--{part.format(short)} part has 1 of 1 documents and 10 tokens, fewer than the 17 "
    with pytest.raises(UserError, match=f"{message}of one sample; lower --seq-length, or add data"):
        datasets(line, 1, 1, 1)


def test_parts_with_their_own_datasets(datasets, prefix, short, write_dataset, tmp_path):
    other = write_dataset(tmp_path / "other", (25,) * 5)
    line = f"--train-data-path {prefix} --valid-data-path {other} --test-data-path {short}"
    train, valid, test = datasets(line, 40, 3, 0)
    assert len(train) >= 40 and len(valid) >= 3 and test is None


@pytest.mark.parametrize("part", ["", "train-", "valid-", "test-"])
def test_an_argument_of_a_part_that_names_no_dataset(datasets, part):
    with pytest.raises(
        UserError, match=f"^--{part}data-path: give a dataset's prefix, or omit it$"
    ):
        datasets(f"--{part}data-path", 1, 1, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, " is missing"),
        ("{", ": not valid JSON"),
        ("[1]", ": holds no JSON object, but "),
        ('{"train": "a", "valid": "b"}', ": needs the entry 'test'"),
        ('{"train": "a", "valid": "", "test": null}', ": valid must be null or list weights and"),
        ('{"train": [], "valid": "b", "test": null}', ": train must be null or list weights and"),
        ('{"train": "a", "valid": "b", "test": 3}', ": test must be null or list weights and"),
    ],
)
def test_a_file_of_parts_that_does_not_name_datasets(datasets, tmp_path, content, message):
    file = tmp_path / "parts.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=f"^--per-split-data-args-path {file}{message}"):
        datasets(f"--per-split-data-args-path {file}", 1, 1, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--data-path {} --vocab-size 500", "ids from 0 to 974, the tokenizer 500 ids"),
        ("--data-path {} --padded-vocab-size 974", "up to 974, but .* embedding has 974 rows"),
        ("", "--data-path: give a dataset's prefix, or --mock-data"),
        ("--data-path 0 {0} 0 {0}", "its weight 0.0 must be positive"),
        ("--data-path 1 {0} -1 {0}", "its weight -1.0 must be positive"),
        ("--data-path nan {0} 1 {0}", "its weight nan must be positive"),
        ("--train-data-path 1 {0} inf {0}", "its weight inf must be positive and finite"),
        ("--data-args-path /dev/null", "^--data-args-path /dev/null: does not list data sets"),
        ("--data-path {0} {0} 1 {0}", "^--data-path: does not list data sets"),
        ("--data-path {0} --mock-data", "^--mock-data and --data-path: the data have one source"),
        ("--data-path {0} --data-args-path {0}", "^--data-path and --data-args-path: the data "),
        ("--data-args-path {0} --test-data-path {0}", "^--data-args-path and --test-data-path: "),
        ("--train-data-path {0} --split 1,0,0", "^--split is for .* with --train-data-path$"),
    ],
)
def test_data_that_is_missing_or_does_not_fit_is_refused(datasets, prefix, line, message):
    with pytest.raises(UserError, match=message):
        datasets(line.format(prefix), 1, 0, 0)


def test_a_tokenizer_that_does_not_fit_the_model(datasets, prefix, capsys):
    """It may have ids without a row if the data does not use them."""
    datasets(f"--data-path {prefix} --padded-vocab-size 975", 1, 0, 0)
    line = "--tokenizer-model: the tokenizer has 1000 ids, the model's embedding 975 rows; data"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("words", ["", "--tokenizer-model folder"])
def test_a_tokenizer_that_cannot_be_compared_is_named(datasets, prefix, words, capsys):
    digest = data_digest(Path(f"{prefix}.bin"))
    sidecar = {"vocab_size": 1000, "data_sha256": digest, "tokenizer_sha256": "0" * 64}
    Path(f"{prefix}.json").write_text(json.dumps(sidecar))
    datasets(f"--data-path {prefix} {words}", 1, 0, 0)
    named = f"--data-path {prefix}: not compared with the tokenizer, which has no tokenizer.json"
    assert (named in capsys.readouterr().out) == bool(words)


@pytest.mark.parametrize("name", ["tokens", "labels"])
def test_a_batch_that_does_not_fit_the_model(datasets, name):
    """Ids that the check of a data set does not reach: in its middle, or made while training."""
    datasets("--mock-data --padded-vocab-size 500", 1, 0, 0)
    args = get_args()
    args.curr_iteration = 2
    batch = {"tokens": torch.tensor([[0, 499]]), "labels": torch.tensor([[499, 1]])}
    _check_ids(batch, args)
    batch[name][0, 0] = 500
    message = r"^iteration 3: the batch has token ids up to 500, but .* has 500 rows; --padded-"
    with pytest.raises(UserError, match=message):
        _check_ids(batch, args)


@pytest.mark.slow
def test_mock_data_needs_no_files(datasets):
    train, valid, _ = datasets("--mock-data", 5, 1, 0)
    assert len(train) >= 5 and len(valid) >= 1 and len(train[0]["tokens"]) == 16
