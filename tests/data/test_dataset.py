"""Datasets that are damaged, foreign or too small are refused before a run trains on them."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_lowbit.data.dataset import cache_folder, check_dataset, check_part, read_index
from megatron_lowbit.data.tokenizer import train_tokenizer
from megatron_lowbit.errors import UserError

# isort: split
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

VOCABULARY = 1000


def write_dataset(prefix, first_token=0, documents=40, length=25, dtype=np.uint16) -> str:
    """Write documents of consecutive ids."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for number in range(documents):
        ids = first_token + np.arange(number * length, (number + 1) * length) % 990
        builder.add_document(ids, [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def prefix(tmp_path) -> str:
    return write_dataset(tmp_path / "data")


def check(prefix: str, vocab_size: int = VOCABULARY, tokenizer_model: str | None = None) -> None:
    check_dataset(prefix, vocab_size, tokenizer_model)


# -- check_dataset ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_a_good_dataset_passes(tmp_path, dtype):
    prefix = write_dataset(tmp_path / "data", dtype=dtype)
    check(prefix)
    index = read_index(prefix)
    assert index.dtype == dtype and index.lengths.tolist() == [25] * 40
    assert index.data_bytes == 1000 * np.dtype(dtype).itemsize


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_and_truncated_files(prefix, suffix):
    path = Path(prefix + suffix)
    content = path.read_bytes()
    for cut in (len(content) - 1, len(content) // 2, 20, 9):
        path.write_bytes(content[:cut])
        with pytest.raises(UserError, match=f"{path}.* (truncated|bytes, its)"):
            check(prefix)
    path.unlink()
    with pytest.raises(UserError, match=f"{path} is missing; a dataset is PREFIX.bin and"):
        check(prefix)


def test_foreign_files(prefix):
    index = Path(prefix + ".idx")
    content = index.read_bytes()
    for place, value, message in ((17, 99, "version 1 and dtype code 99"), (9, 2, "has version 2")):
        index.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
        with pytest.raises(UserError, match=message):
            check(prefix)
    for foreign in (b"PK\x03\x04" + content, b"", b"MMIDIDX\x00"):
        index.write_bytes(foreign)
        with pytest.raises(UserError, match="is not the index of a Megatron dataset"):
            check(prefix)


def test_empty_and_float_datasets(tmp_path):
    empty = write_dataset(tmp_path / "empty", documents=0)
    with pytest.raises(UserError, match="the dataset is empty"):
        check(empty)
    floats = write_dataset(tmp_path / "floats", dtype=np.float32)
    with pytest.raises(UserError, match="holds float32, not token ids"):
        check(floats)


def test_token_ids_outside_the_vocabulary(prefix, tmp_path):
    check(prefix, 990)
    with pytest.raises(UserError, match="ids from 0 to 989, the tokenizer 989 ids"):
        check(prefix, 989)
    negative = write_dataset(tmp_path / "negative", first_token=-5, dtype=np.int32)
    with pytest.raises(UserError, match="ids from -5 to"):
        check(negative)


def test_the_sidecar_decides(prefix, tmp_path):
    sidecar, digests = Path(f"{prefix}.json"), []
    for name in ("one", "other"):
        train_tokenizer(iter([f"some words of {name}"] * 3), 270, tmp_path / name)
        content = (tmp_path / name / "tokenizer.json").read_bytes()
        digests.append(hashlib.sha256(content).hexdigest())
    sidecar.write_text(json.dumps({"tokenizer_sha256": digests[0], "vocab_size": 270}))
    check(prefix, 270, str(tmp_path / "one"))
    made, given = (f"{digest[:12]} and 270 ids" for digest in digests)
    with pytest.raises(UserError, match=f"sha256 {made}, but --tokenizer-model has {given}; "):
        check(prefix, 270, str(tmp_path / "other"))
    # Tokenizers without such a file are compared by their size.
    check(prefix, 270)
    check(prefix, 271, str(tmp_path))
    with pytest.raises(UserError, match="but --tokenizer-model has None and 269 ids"):
        check(prefix, 269)


@pytest.mark.parametrize("content", ["[", "[]", "{}", '{"tokenizer_sha256": 1, "vocab_size": "x"}'])
def test_a_damaged_sidecar(prefix, content):
    Path(f"{prefix}.json").write_text(content)
    with pytest.raises(UserError, match=r"data\.json must be a JSON object"):
        check(prefix)


# -- check_part ------------------------------------------------------------------------------------


def test_a_part_needs_the_tokens_of_one_sample(prefix):
    # 32 of 40 documents, 800 tokens: a sample's last token is only predicted.
    check_part(prefix, "training", (0, 0.8), 799, "80,20,0")
    with pytest.raises(UserError) as caught:
        check_part(prefix, "training", (0, 0.8), 800, "80,20,0")
    assert str(caught.value) == (
        f"--data-path {prefix}: the training part has 32 of 40 documents and 800 tokens, fewer "
        "than the 801 of one sample; raise its share in --split 80,20,0, lower --seq-length, or "
        "add data"
    )


def test_a_share_that_rounds_to_no_document(prefix):
    with pytest.raises(UserError, match="validation part has 0 of 40 documents and 0 tokens"):
        check_part(prefix, "validation", (0.99, 1.0), 16, "99,1,0")
    # 0.975 * 40 = 39: one document.
    check_part(prefix, "validation", (0.975, 1.0), 16, "97.5,2.5,0")


# -- cache_folder ----------------------------------------------------------------------------------


def test_the_cache_is_beside_the_first_dataset(prefix, tmp_path):
    other = write_dataset(tmp_path / "other", documents=3)
    folder = Path(cache_folder([prefix, other]))
    assert folder.is_dir() and folder.parent == tmp_path / "cache"
    assert cache_folder([prefix, other]) == str(folder) != cache_folder([prefix])


def test_new_data_under_an_old_name_has_another_cache(prefix):
    before = cache_folder([prefix])
    write_dataset(prefix, documents=20, length=50)
    assert cache_folder([prefix]) != before


def test_a_cache_that_cannot_be_written(prefix, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(UserError, match="cache: cannot be written to; give --data-cache-path"):
            cache_folder([prefix])
    for folder in (tmp_path / "cache").iterdir():
        folder.rmdir()
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cache: cannot be written to; give --data-cache-path"):
        cache_folder([prefix])
