"""An index of any content is refused in one line, or describes the data as it is."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lowbit.data.dataset import check_dataset
from megatron_lowbit.errors import UserError

# isort: split
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

LENGTHS = (3, 1, 4, 1, 5)
DTYPES = (np.uint16, np.int32, np.int64)
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


def write_data(folder: Path, dtype: type) -> str:
    """Write five documents; their index has 34 + 5 * 4 + 5 * 8 + 6 * 8 bytes."""
    builder = IndexedDatasetBuilder(str(folder / "data.bin"), dtype=dtype)
    for number, length in enumerate(LENGTHS):
        builder.add_document(np.arange(length) + 10 * number, [length])
    builder.finalize(str(folder / "data.idx"))
    return str(folder / "data")


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
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_index(tmp_path, dtype, examples):
    prefix = write_data(tmp_path, dtype)
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
