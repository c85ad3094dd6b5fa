"""Datasets: bad files are refused, samples are the tokens, and a resumed run sees the same."""

import json
from argparse import Namespace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.training.data import (
    batch_iterator,
    build_datasets,
    check_dataset,
    parse_data_path,
)
from megatron_lowbit.data.tokenizer import load_tokenizer

# isort: split
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

TOKENIZER = load_tokenizer("NullTokenizer", None, 999)
SEQ_LENGTH = 16


def write_dataset(prefix, first_token=0, documents=40, length=25, dtype=np.uint16):
    """Documents of consecutive ids: a sample shows where it came from."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for number in range(documents):
        ids = first_token + np.arange(number * length, (number + 1) * length) % 990
        builder.add_document(ids, [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def prefix(tmp_path):
    return write_dataset(tmp_path / "data")


def arguments(*data_path, **changes):
    values = {"split": "80,10,10", "seq_length": SEQ_LENGTH, "seed": 1, "data_cache_path": None}
    return Namespace(data_path=list(data_path), **{**values, **changes})


def tokens(batches):
    return [batch["tokens"].tolist() for batch in batches]


# ---------------------------------------------------------------------------------- check_dataset


def test_a_good_dataset_passes(prefix):
    check_dataset(prefix, TOKENIZER)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_and_truncated_files(prefix, suffix):
    path = Path(prefix + suffix)
    content = path.read_bytes()
    for cut in (len(content) - 1, len(content) // 2, 20, 9):
        path.write_bytes(content[:cut])
        with pytest.raises(UserError, match=f"{path}.* (truncated|bytes, its)"):
            check_dataset(prefix, TOKENIZER)
    path.unlink()
    with pytest.raises(UserError, match=f"{path} is missing"):
        check_dataset(prefix, TOKENIZER)


def test_foreign_files(prefix):
    index = Path(prefix + ".idx")
    content = index.read_bytes()
    index.write_bytes(content[:17] + b"\x63" + content[18:])
    with pytest.raises(UserError, match=r"dtype code 99"):
        check_dataset(prefix, TOKENIZER)
    index.write_bytes(b"PK\x03\x04" + content)
    with pytest.raises(UserError, match=r"is not the index of a Megatron dataset"):
        check_dataset(prefix, TOKENIZER)
    index.write_bytes(b"")
    with pytest.raises(UserError, match=r"is not the index of a Megatron dataset"):
        check_dataset(prefix, TOKENIZER)


def test_empty_and_float_datasets(tmp_path):
    empty = write_dataset(tmp_path / "empty", documents=0)
    with pytest.raises(UserError, match=r"the dataset is empty"):
        check_dataset(empty, TOKENIZER)
    floats = write_dataset(tmp_path / "floats", dtype=np.float32)
    with pytest.raises(UserError, match=r"holds float32, not token ids"):
        check_dataset(floats, TOKENIZER)


def test_token_ids_beyond_the_vocabulary(prefix, tmp_path):
    small = load_tokenizer("NullTokenizer", None, 500)
    with pytest.raises(UserError, match=r"ids from 0 to 989, the tokenizer 501 ids"):
        check_dataset(prefix, small)
    negative = write_dataset(tmp_path / "negative", first_token=-5, dtype=np.int32)
    with pytest.raises(UserError, match=r"ids from -5 to"):
        check_dataset(negative, TOKENIZER)


def test_the_sidecar_decides(prefix):
    sidecar = Path(prefix + ".json")
    ours = Namespace(sha256="a" * 64, vocab_size=1000)
    sidecar.write_text(json.dumps({"tokenizer_sha256": "a" * 64, "vocab_size": 1000}))
    check_dataset(prefix, ours)
    check_dataset(prefix, TOKENIZER)
    with pytest.raises(
        UserError, match=r"sha256 aaaaaaaaaaaa and 1000 ids, but .* has bbbbbbbbbbbb"
    ):
        check_dataset(prefix, Namespace(sha256="b" * 64, vocab_size=1000))
    with pytest.raises(UserError, match=r"1000 ids, but .* 501 ids"):
        check_dataset(prefix, load_tokenizer("NullTokenizer", None, 500))
    for content in ("[", "[]", "{}"):
        sidecar.write_text(content)
        with pytest.raises(UserError, match=r"data.json must be a JSON object"):
            check_dataset(prefix, TOKENIZER)


# --------------------------------------------------------------------------------- build_datasets


def test_samples_are_the_tokens(prefix):
    train, valid, test = build_datasets(arguments(prefix), TOKENIZER, (100, 4, 0))
    assert len(train) >= 100 and len(valid) >= 4 and test is None
    sample = train[0]
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["loss_mask"].tolist() == [1.0] * SEQ_LENGTH
    assert sample["position_ids"].tolist() == list(range(SEQ_LENGTH))
    # Consecutive ids within a document: at most one jump where two documents meet.
    assert ((sample["labels"] - sample["tokens"]) != 1).sum() <= 1


def test_splits_do_not_overlap(tmp_path):
    prefix = write_dataset(tmp_path / "data", documents=39)  # 975 different ids
    datasets = build_datasets(arguments(prefix), TOKENIZER, (40, 3, 3))
    seen = [
        {int(token) for i in range(len(dataset)) for token in dataset[i]["tokens"]}
        for dataset in datasets
    ]
    assert all(seen)
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_the_seed_decides_the_order(prefix):
    def order(seed):
        train, _, _ = build_datasets(arguments(prefix, seed=seed), TOKENIZER, (30, 0, 0))
        return [train[i]["tokens"].tolist() for i in range(len(train))]

    assert order(1) == order(1) != order(2)


def test_new_data_under_an_old_name_is_not_read_through_the_old_index(prefix):
    build_datasets(arguments(prefix), TOKENIZER, (30, 0, 0))
    write_dataset(prefix, documents=20, length=10)
    train, _, _ = build_datasets(arguments(prefix), TOKENIZER, (30, 0, 0))
    for i in range(len(train)):
        assert len(train[i]["tokens"]) == SEQ_LENGTH
        assert train[i]["tokens"].max() < 200


def test_the_cache_folder(prefix, tmp_path):
    build_datasets(arguments(prefix), TOKENIZER, (3, 0, 0))
    assert list((tmp_path / "cache").rglob("*.npy"))
    other = tmp_path / "other"
    build_datasets(arguments(prefix, data_cache_path=str(other)), TOKENIZER, (3, 0, 0))
    assert list(other.rglob("*.npy"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--data-cache-path .*file: not a folder"):
        build_datasets(
            arguments(prefix, data_cache_path=str(tmp_path / "file")), TOKENIZER, (3, 0, 0)
        )


def test_a_blend_keeps_the_weights(tmp_path):
    low = write_dataset(tmp_path / "low", documents=19)
    high = write_dataset(tmp_path / "high", first_token=500, documents=19)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        args = arguments("3", low, "1", high, split="1")
        train, _, _ = build_datasets(args, TOKENIZER, (40, 0, 0))
    finally:
        torch.distributed.destroy_process_group()
    batches = batch_iterator(train, consumed_samples=0, micro_batch_size=40, dp_rank=0, dp_size=1)
    first = next(batches)["tokens"][:, 0]
    assert (first >= 500).sum() == 10


@pytest.mark.parametrize(
    ("data_path", "expected"),
    [
        (["a"], (["a"], None)),
        (["1.5", "a"], (["a"], None)),
        (["1", "a", "2", "b"], (["a", "b"], [1.0, 2.0])),
    ],
)
def test_data_path(data_path, expected):
    assert parse_data_path(data_path) == expected


@pytest.mark.parametrize("data_path", [[], ["a", "b"], ["1", "a", "b"], ["0", "a", "1", "b"]])
def test_bad_data_path(data_path):
    with pytest.raises(UserError, match=r"give one PREFIX, or WEIGHT PREFIX pairs"):
        parse_data_path(data_path)


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,1,1,1", "-1,2", "nan,1"])
def test_bad_split(prefix, split):
    with pytest.raises(UserError, match=r"--split .*: give up to three shares"):
        build_datasets(arguments(prefix, split=split), TOKENIZER, (1, 0, 0))


def test_too_little_data_names_the_split_and_the_counts(prefix, tmp_path):
    with pytest.raises(UserError, match=r"train part has 32 of 40 documents and 800 tokens"):
        build_datasets(arguments(prefix, seq_length=800), TOKENIZER, (1, 0, 0))
    with pytest.raises(UserError, match=r"validation part has 0 of 40 documents.*--split 99,1,0"):
        build_datasets(arguments(prefix, split="99,1,0"), TOKENIZER, (1, 1, 0))
    with pytest.raises(UserError, match=r"test part has 0 of 40 documents and 0 tokens"):
        build_datasets(arguments(prefix, split="1"), TOKENIZER, (1, 0, 1))
    assert not (tmp_path / "cache").exists()
    # One token over a sample is enough, and an empty split that is not needed does no harm.
    train, _, _ = build_datasets(
        arguments(prefix, seq_length=799, split="80,0.01,19.99"), TOKENIZER, (5, 0, 0)
    )
    assert len(train) >= 5


# --------------------------------------------------------------------------------- batch_iterator


@pytest.fixture
def dataset(prefix):
    train, _, _ = build_datasets(arguments(prefix), TOKENIZER, (30, 0, 0))
    return train


def batches(dataset, number, consumed=0, micro_batch_size=4, dp_rank=0, dp_size=1, **options):
    iterator = batch_iterator(
        dataset,
        consumed_samples=consumed,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        **options,
    )
    return list(islice(iterator, number))


def test_batches_are_stacked_samples(dataset):
    second = batches(dataset, 2)[1]
    for key, dtype in (
        ("tokens", torch.int64),
        ("labels", torch.int64),
        ("loss_mask", torch.float32),
        ("position_ids", torch.int64),
    ):
        assert second[key].dtype == dtype
        assert torch.equal(second[key], torch.stack([dataset[i][key] for i in range(4, 8)]))


def test_a_resumed_iterator_continues_across_the_end_of_the_dataset(dataset):
    number = 3 * len(dataset) // 4
    whole = tokens(batches(dataset, number))
    assert number * 4 > 2 * len(dataset)
    for done in (1, 5, number - 2):
        assert tokens(batches(dataset, number - done, consumed=4 * done)) == whole[done:]


def test_the_stream_has_no_gaps_at_the_end_of_the_dataset(dataset):
    stream = [row for batch in tokens(batches(dataset, len(dataset))) for row in batch]
    expected = [dataset[i % len(dataset)]["tokens"].tolist() for i in range(4 * len(dataset))]
    assert stream == expected


def test_data_parallel_ranks_share_the_same_stream(dataset):
    whole = [row for batch in tokens(batches(dataset, 40)) for row in batch]
    ranks = [tokens(batches(dataset, 40, micro_batch_size=2, dp_rank=r, dp_size=2)) for r in (0, 1)]
    assert [row for step in zip(*ranks, strict=True) for part in step for row in part] == whole


def test_worker_processes_and_the_global_generator(dataset):
    state = torch.get_rng_state()
    expected = tokens(batches(dataset, 6))
    assert tokens(batches(dataset, 6, num_workers=2)) == expected
    assert torch.equal(torch.get_rng_state(), state)
