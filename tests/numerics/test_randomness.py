"""Random bits: the published vectors, the layout of the counters, and keys."""

import hashlib

import pytest
import torch

from megatron_lowbit.numerics.randomness import Draw, derive_key, philox4x32, uniform

MASK = 0xFFFFFFFF

# Random123's kat_vectors, philox4x32 10.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    """Return the published algorithm on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right & MASK, (left >> 32) ^ c[3] ^ k[1], left & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_random123_known_answers(counter, key, expected):
    result = philox4x32(
        tuple(torch.tensor(word) for word in words(counter)),
        tuple(torch.tensor(word) for word in words(key)),
    )
    assert [int(word) for word in result] == words(expected)
    assert philox_in_integers(words(counter), words(key)) == words(expected)


@pytest.mark.parametrize("bits", [8, 16])
def test_uniform_layout(bits):
    """Blocks at counters (0, row, 0, 0), (1, row, 0, 0), ... in one string: bits per element."""
    key = 0x89ABCDEF_FEDCBA98
    rows, groups = torch.tensor([0, 1, 7, 2**31 + 5, MASK]), torch.tensor([0, 1, 2, 5, 2**28])
    drawn = uniform(Draw(key).key_words(torch.device("cpu")), rows, groups, bits)
    assert drawn.dtype == torch.float32 and drawn.shape == (len(rows), 16 * len(groups))
    for i, row in enumerate(rows.tolist()):
        for col in range(drawn.shape[1]):
            first = (16 * groups.tolist()[col // 16] + col % 16) * bits
            block = philox_in_integers([first // 128, row, 0, 0], [key & MASK, key >> 32])
            string = sum(word << (32 * j) for j, word in enumerate(block))
            number = (string >> (first % 128)) % 2**bits
            assert drawn[i, col].item() == 1 - (number + 0.5) / 2**bits


def test_shard_draws_the_slice_of_the_whole():
    device = torch.device("cpu")
    whole = Draw(99)
    full = uniform(whole.key_words(device), *whole.counters(40, 64, device), 8)
    for first_row, rows, first_group, groups in ((0, 40, 0, 4), (8, 5, 1, 2), (39, 1, 3, 1)):
        shard = Draw(
            99,
            torch.arange(first_row, first_row + rows),
            torch.arange(first_group, first_group + groups),
        )
        part = uniform(shard.key_words(device), *shard.counters(rows, 16 * groups, device), 8)
        columns = slice(16 * first_group, 16 * (first_group + groups))
        assert torch.equal(part, full[first_row : first_row + rows, columns])


def test_counters_cover_ragged_columns_and_refuse_other_sizes():
    device = torch.device("cpu")
    rows, groups = Draw(1).counters(3, 17, device)
    assert rows.tolist() == [0, 1, 2] and groups.tolist() == [0, 1]
    for draw in (Draw(1, rows=torch.arange(4)), Draw(1, groups=torch.arange(3))):
        with pytest.raises(ValueError, match="3 x 17"):
            draw.counters(3, 17, device)


def test_derive_key():
    """BLAKE2b, 8 bytes, of the little-endian 64-bit parts; every part and their order count."""
    packed = b"".join(part.to_bytes(8, "little", signed=True) for part in (3, -1, 2**40))
    expected = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    assert derive_key(3, -1, 2**40) == expected
    parts = (5, 6, 7, 8)
    keys = {derive_key(*parts), derive_key(*reversed(parts)), derive_key(*parts, 0)}
    for i in range(len(parts)):
        keys.add(derive_key(*parts[:i], parts[i] + 1, *parts[i + 1 :]))
    assert len(keys) == 3 + len(parts)
    assert all(0 <= key < 2**64 for key in keys)


def test_a_derived_key_derives_further():
    """Keys are 64-bit unsigned; every one of them is a valid part of the next."""
    keys = {derive_key(key, 1, 2) for key in (0, 2**63 - 1, 2**63, 2**64 - 1)}
    assert len(keys) == 4


def test_names_are_parts_too():
    """A name's length counts, so names that join to the same text differ, and 1 is not "1"."""
    keys = [derive_key("ab", "c"), derive_key("a", "bc"), derive_key("abc"), derive_key("c", "ab")]
    keys += [derive_key(1), derive_key("1"), derive_key()]
    assert len(set(keys)) == len(keys)
