"""Datasets that are damaged, foreign or too small are refused before a run trains on them."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lowbit.data import dataset
from megatron_lowbit.data.dataset import check_dataset, check_part, data_digest, read_index
from megatron_lowbit.data.tokenizer import train_tokenizer
from megatron_lowbit.errors import UserError

VOCABULARY = 1000


def check(prefix: str, vocab_size: int = VOCABULARY, tokenizer_model: str | None = None) -> None:
    check_dataset(prefix, vocab_size, tokenizer_model)


# -- check_dataset ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_a_good_dataset_passes(write_dataset, tmp_path, dtype):
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


def test_empty_and_float_datasets(write_dataset, tmp_path):
    empty = write_dataset(tmp_path / "empty", ())
    with pytest.raises(UserError, match="the dataset is empty"):
        check(empty)
    floats = write_dataset(tmp_path / "floats", dtype=np.float32)
    with pytest.raises(UserError, match="holds float32, not token ids"):
        check(floats)


def test_token_ids_outside_the_vocabulary(prefix, write_dataset, tmp_path):
    check(prefix, 990)
    with pytest.raises(UserError, match="ids from 0 to 989, the tokenizer 989 ids"):
        check(prefix, 989)
    negative = write_dataset(tmp_path / "negative", first_token=-5, dtype=np.int32)
    with pytest.raises(UserError, match="ids from -5 to"):
        check(negative)


def write_sidecar(prefix: str, **content: object) -> None:
    digest = data_digest(Path(f"{prefix}.bin"))
    Path(f"{prefix}.json").write_text(json.dumps(content | {"data_sha256": digest}))


def test_the_sidecar_names_the_tokenizer(write_dataset, tmp_path):
    prefix, digests = write_dataset(tmp_path / "data", (25,) * 10), []
    for name in ("one", "other"):
        train_tokenizer(iter([f"some words of {name}"] * 3), 270, tmp_path / name)
        content = (tmp_path / name / "tokenizer.json").read_bytes()
        digests.append(hashlib.sha256(content).hexdigest())
    write_sidecar(prefix, tokenizer_sha256=digests[0], vocab_size=270)
    check(prefix, 270, str(tmp_path / "one"))
    made, given = (f"{digest[:12]} and 270 ids" for digest in digests)
    with pytest.raises(UserError, match=f"sha256 {made}, but --tokenizer-model has {given}; "):
        check(prefix, 270, str(tmp_path / "other"))
    # Tokenizers without such a file are compared by their size.
    check(prefix, 270)
    check(prefix, 271, str(tmp_path))
    with pytest.raises(UserError, match="but --tokenizer-model has None and 269 ids"):
        check(prefix, 269)


def test_the_sidecar_records_the_borders_and_ends_of_documents(prefix, write_dataset, tmp_path):
    """The other index is of as many tokens."""
    index = Path(f"{prefix}.idx")
    write_sidecar(prefix, vocab_size=990, index_sha256=data_digest(index), eod=7)
    check_dataset(prefix, 990, None, eod=7)
    with pytest.raises(UserError, match="end of document 7, but --tokenizer-model has 8; give"):
        check_dataset(prefix, 990, None, eod=8)
    tokens = Path(f"{prefix}.bin").stat().st_size // 2
    other = write_dataset(tmp_path / "other", (tokens - 10, 10))
    index.write_bytes(Path(f"{other}.idx").read_bytes())
    with pytest.raises(UserError, match=f"{index} is not the data that .*json describes"):
        check_dataset(prefix, 990, None, eod=7)


def test_token_ids_without_a_row_in_the_model(prefix):
    check_dataset(prefix, VOCABULARY, None, 990)
    message = "has token ids up to 989, but the model's embedding has 989 rows; --padded-vocab-size"
    with pytest.raises(UserError, match=message + " 990 or more"):
        check_dataset(prefix, VOCABULARY, None, 989)


def test_the_sidecar_records_ids_beyond_the_checked_ones(prefix, monkeypatch):
    monkeypatch.setattr(dataset, "_CHECKED_TOKENS", 10)
    check_dataset(prefix, VOCABULARY, None, 500)
    write_sidecar(prefix, tokenizer_sha256=None, vocab_size=990, largest_id=989)
    check_dataset(prefix, VOCABULARY, None, 990)
    with pytest.raises(UserError, match="ids up to 989, but the model's embedding has 500 rows"):
        check_dataset(prefix, VOCABULARY, None, 500)


def test_a_sidecar_of_other_data_is_refused(prefix):
    write_sidecar(prefix, tokenizer_sha256=None, vocab_size=500)
    with pytest.raises(UserError, match="ids from 0 to 989, the tokenizer 600 ids"):
        check(prefix, 600)
    data = Path(f"{prefix}.bin")
    data.write_bytes(b"\x01" + data.read_bytes()[1:])
    with pytest.raises(UserError, match=r"data\.bin is not the data that .*data\.json describes"):
        check(prefix, 990)


def test_the_digest_of_a_large_file_takes_samples(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    first = data_digest(path)
    with path.open("r+b") as file:
        file.truncate((1 << 30) - 1)
    assert data_digest(path) != first


# Header 34 bytes; 40 lengths (int32), 40 offsets (int64), 41 boundaries (int64).
LENGTHS, OFFSETS, DOCUMENTS = 34, 34 + 4 * 40, 34 + 12 * 40


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (LENGTHS + 4 * 7, struct.pack("<i", -25), "sequence 7 .* length -25 and offset 350"),
        (LENGTHS, struct.pack("<i", 0), "sequence 0 .* length 0 and offset 0"),
        (LENGTHS + 4 * 39, struct.pack("<i", 2**31 - 1), "its index promises"),
        (OFFSETS, struct.pack("<q", 50), "sequence 0 .* length 25 and offset 50"),
        (OFFSETS + 8 * 9, struct.pack("<q", 400), "sequence 9 .* offset 400"),
        (OFFSETS + 8 * 39, struct.pack("<q", -2), "sequence 39 .* offset -2"),
        (DOCUMENTS, struct.pack("<q", 1), "document boundaries"),
        (DOCUMENTS + 8 * 40, struct.pack("<q", 41), "document boundaries"),
        (DOCUMENTS + 8 * 5, struct.pack("<q", 39), "document boundaries"),
    ],
)
def test_an_index_that_does_not_describe_documents_in_order(prefix, place, value, message):
    index = Path(f"{prefix}.idx")
    content = bytearray(index.read_bytes())
    content[place : place + len(value)] = value
    index.write_bytes(content)
    with pytest.raises(UserError, match=message):
        check(prefix)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not valid JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "needs the entry 'vocab_size'"),
        ('{"tokenizer_sha256": 1, "vocab_size": "x"}', "vocab_size 'x': must be an integer"),
        ('{"vocab_size": 990}', "needs the entry 'data_sha256'"),
    ],
)
def test_a_damaged_sidecar(prefix, content, message):
    Path(f"{prefix}.json").write_text(content)
    with pytest.raises(UserError, match=rf"data\.json.* {message}"):
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


def test_one_document_has_one_part(write_dataset, tmp_path):
    """The error names what works, for no --split gives the other part a document."""
    prefix = write_dataset(tmp_path / "one", (100,))
    with pytest.raises(UserError, match=r"one document cannot be .* --split 100,0,0 --eval"):
        check_part(prefix, "validation", (0.95, 1.0), 16, "95,5,0")
    check_part(prefix, "training", (0.0, 1.0), 16, "100,0,0")


# -- an index of any content -----------------------------------------------------------------------

FUZZED = (3, 1, 4, 1, 5)
"""Lengths of documents: their index has 34 + 5 * 4 + 5 * 8 + 6 * 8 bytes."""
HEADER = {
    "version": (9, "<Q"),
    "dtype": (17, "<B"),
    "sequences": (18, "<Q"),
    "documents": (26, "<Q"),
}
START = 34

# Numbers where an integer changes its sign or its width, and small ones.
NUMBERS = st.one_of(
    st.integers(-2, 20), st.sampled_from([2**k + d for k in (15, 31, 32, 60, 63) for d in (-1, 0)])
)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(list(HEADER)), st.just(0), NUMBERS),
        st.tuples(st.just("length"), st.integers(0, 4), NUMBERS),
        st.tuples(st.just("offset"), st.integers(0, 4), NUMBERS),
        st.tuples(st.just("boundary"), st.integers(0, 5), NUMBERS),
        st.tuples(st.just("byte"), st.integers(0, 141), st.integers(0, 255)),
        st.tuples(st.just("cut"), st.integers(0, 141), st.just(0)),
        st.tuples(st.just("append"), st.integers(1, 16), st.just(0)),
    ),
    min_size=1,
    max_size=4,
)


def edit(content: bytearray, edits: list[tuple[str, int, int]]) -> None:
    """Change an index in place; a number is stored as far as its field is wide."""
    lengths, offsets, boundaries = START, START + 4 * 5, START + 12 * 5
    places = {"length": (lengths, "<I"), "offset": (offsets, "<Q"), "boundary": (boundaries, "<Q")}
    for field, position, number in edits:
        if field == "cut":
            del content[position:]
        elif field == "append":
            content.extend(bytes(position))
        else:
            start, code = {**HEADER, **places, "byte": (0, "<B")}[field]
            size = struct.calcsize(code)
            stored = struct.pack(code, number % 256**size)
            content[start + size * position : start + size * (position + 1)] = stored


@pytest.mark.parametrize("examples", [200, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_any_index(write_dataset, tmp_path, dtype, examples):
    """It is refused in one line, or describes the data as it is."""
    prefix = write_dataset(tmp_path / "data", FUZZED, dtype=dtype)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin").read_bytes()
    whole = index.read_bytes()
    assert len(whole) == 142

    @settings(max_examples=examples, deadline=5000)
    @given(edits=EDITS)
    def fuzz(edits: list[tuple[str, int, int]]) -> None:
        content = bytearray(whole)
        edit(content, edits)
        index.write_bytes(content)
        try:
            check_dataset(prefix, 2**40, None)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
        else:
            # Megatron-LM reads every byte of the data, once and in order.
            read = IndexedDataset(prefix)
            assert b"".join(read[i].tobytes() for i in range(len(read))) == data

    fuzz()
