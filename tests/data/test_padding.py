"""Padded documents, against a loop over their tokens."""

from itertools import pairwise

import pytest
import torch
from torch.utils.data import default_collate

from megatron_lowbit.data.padding import pad_documents

LENGTH = 48


def sample_of(lengths: list[int], first: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(first, first + LENGTH)
    ends = torch.tensor(lengths).cumsum(0)
    boundaries = torch.full((LENGTH + 1,), LENGTH, dtype=torch.int32)
    boundaries[0], boundaries[1 : len(lengths) + 1] = 0, ends
    return {
        "tokens": tokens, "labels": tokens + 1, "loss_mask": (tokens % 7 != 0).float(),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": boundaries, "max_seqlen": torch.tensor(max(lengths), dtype=torch.int32),
        "dataset_id": torch.tensor(3),
    }  # fmt: skip


def padded_by_hand(lengths: list[int], first: int, multiple: int) -> dict[str, list]:
    token, tokens, masks, positions, ends = first, [], [], [], [0]
    for length in lengths:
        full = length + -length % multiple
        for position in range(full):
            within = position < length
            tokens.append(token + position if within else 0)
            masks.append(float(within and (token + position) % 7 != 0))
            positions.append(position)
        token += length
        ends.append(min(ends[-1] + full, LENGTH))
    cut = {"tokens": tokens, "loss_mask": masks, "position_ids": positions}
    return {key: values[:LENGTH] for key, values in cut.items()} | {"ends": ends}


@pytest.mark.parametrize("multiple", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "lengths",
    [[48], [1, 46, 1], [16, 16, 16], [5, 7, 30, 6], [1] * 48, [47, 1], [3, 44, 1]],
)
def test_documents_begin_at_multiples_and_keep_their_tokens(lengths, multiple):
    batch = default_collate([sample_of(lengths, 100), sample_of(lengths[::-1], 300)])
    result = pad_documents(batch, multiple)
    for row, (each, first) in enumerate([(lengths, 100), (lengths[::-1], 300)]):
        expected = padded_by_hand(each, first, multiple)
        for key in ("tokens", "loss_mask", "position_ids"):
            assert result[key][row].tolist() == expected[key]
        tokens = result["tokens"][row]
        assert torch.equal(result["labels"][row], torch.where(tokens == 0, 0, tokens + 1))
        ends = expected["ends"]
        boundaries = result["cu_seqlens"][row].tolist()
        assert boundaries == ends + [LENGTH] * (LENGTH + 1 - len(ends))
        assert all(end % multiple == 0 for end in boundaries)
        assert result["max_seqlen"][row] == max(b - a for a, b in pairwise(ends))
    for key in batch.keys() - {"dataset_id"}:
        assert (result[key].shape, result[key].dtype) == (batch[key].shape, batch[key].dtype)
