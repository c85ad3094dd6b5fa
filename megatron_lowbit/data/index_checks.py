"""Checks that sample indices are what Megatron-LM builds, but for the order that it draws.

Indices may be damaged (a file of zeros after the loss of a machine) or of another dataset. Source:
``GPTDataset`` and ``BlendedDataset`` of Megatron-LM, and its ``helpers.cpp``.
"""

import numpy as np

_CHUNK = 1 << 22


def is_sample_index(
    documents: np.ndarray,
    samples: np.ndarray,
    order: np.ndarray,
    lengths: np.ndarray,
    part: range,
    sequence_length: int,
) -> bool:
    """Return True if samples of a part's documents follow one another, and each is read once.

    Args:
        documents: document index (D,), of integers: the documents of all epochs.
        samples: sample index (N+1, 2), of integers: entry of ``documents`` and offset in tokens
            at which a sample begins; the last row is the end of the last sample.
        order: shuffle index (N,), of integers: the sample of each step.
        lengths: tokens of each document of the dataset, int32.
        part: the documents for training, validation or test.
        sequence_length: tokens of a sample.
    """
    are_integers = all(array.dtype.kind in "iu" for array in (documents, samples, order))
    if not are_integers or documents.ndim != 1 or samples.ndim != 2 or samples.shape[1] != 2:
        return False
    return (
        order.shape == (len(samples) - 1,)
        and _is_permutation(order)
        and _has_whole_epochs(documents, part)
        and _follow_one_another(documents, samples, lengths, sequence_length)
    )


def is_blend_index(datasets: np.ndarray, samples: np.ndarray, count: int) -> bool:
    """Return True if a blend reads the samples of each of its datasets in order.

    Args:
        datasets: dataset of each step (N,), of integers.
        samples: sample of that dataset (N,), of integers.
        count: number of datasets.
    """
    if not (datasets.dtype.kind == samples.dtype.kind == "i" and datasets.ndim == 1):
        return False
    if datasets.shape != samples.shape or not _is_within(datasets, count):
        return False
    own = (samples[datasets == number] for number in range(count))
    return all(np.array_equal(numbers, np.arange(len(numbers))) for numbers in own)


def _is_within(values: np.ndarray, end: int) -> bool:
    return values.size == 0 or (values.min() >= 0 and values.max() < end)


def _is_permutation(order: np.ndarray) -> bool:
    if not _is_within(order, len(order)):
        return False
    is_there = np.zeros(len(order), bool)
    is_there[order] = True
    return bool(is_there.all())


def _has_whole_epochs(documents: np.ndarray, part: range) -> bool:
    """Return True if all documents of a part are there equally often, and no other one."""
    if not len(documents) or documents.min() < part.start or documents.max() >= part.stop:
        return False
    times = np.zeros(len(part), np.int64)
    for first in range(0, len(documents), _CHUNK):
        numbers = documents[first : first + _CHUNK] - part.start
        times += np.bincount(numbers, minlength=len(part))
    return bool((times == times[0]).all())


def _follow_one_another(
    documents: np.ndarray, samples: np.ndarray, lengths: np.ndarray, sequence_length: int
) -> bool:
    """Return True if all samples have their length, but for one that ends with the documents."""
    entries, offsets = np.ascontiguousarray(samples[:, 0]), samples[:, 1]
    if len(entries) < 2 or not _is_within(entries, len(documents)):
        return False
    if (entries[1:] < entries[:-1]).any():
        return False
    begins, end = np.empty(len(entries), np.int64), 0
    for first in range(0, len(documents), _CHUNK):
        sizes = lengths[documents[first : first + _CHUNK]].astype(np.int64)
        ends = end + np.cumsum(sizes)
        low, high = np.searchsorted(entries, (first, first + len(sizes)))
        within, offset = entries[low:high] - first, offsets[low:high]
        if (offset < 0).any() or (offset > sizes[within]).any():
            return False
        begins[low:high] = (ends - sizes)[within] + offset
        end = int(ends[-1])
    expected = sequence_length * np.arange(len(begins))
    # The last token may be a label only.
    is_end = begins[-1] in (end, end - 1) and begins[-2] < begins[-1] < expected[-1]
    return np.array_equal(begins[:-1], expected[:-1]) and bool(is_end or begins[-1] == expected[-1])
