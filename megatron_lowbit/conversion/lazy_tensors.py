"""Plan of a conversion: an input that does not fit is refused before anything is written."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import (
    CONFIG,
    WEIGHT_DTYPES,
    Folder,
    LazyTensors,
)
from megatron_lowbit.checkpoints.reader import EMBEDDING, CheckpointReader
from megatron_lowbit.checkpoints.writer import LazyChunk
from megatron_lowbit.conversion.mapping import HEAD, Rule
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

_USUAL_HEAD = "lm_head.weight"
_PADDING = "pad_vocab_size_multiple"
"""The entry of config.json by which a model says that its vocabulary has rows without tokens."""


def check_names(folder: Folder, rules: Sequence[Rule]) -> None:
    """Raise UserError where a folder's tensors are not those of the rules.

    A model whose embedding and output are tied may hold the embedding again as ``lm_head.weight``.
    """
    names = {rule.target.key: rule.names[0] for rule in rules}
    head = names.get(HEAD)
    if head and head not in folder.file_of:
        raise UserError(
            f"{folder.path}: no tensor {head}, but {CONFIG} says that embedding and output are "
            'not tied; "tie_word_embeddings": true takes the embedding for both'
        )
    expected = {name for rule in rules for name in rule.names}
    if not head and _USUAL_HEAD in folder.file_of:
        embedding = names[EMBEDDING]
        folder.check(expected | {_USUAL_HEAD})
        if not torch.equal(folder.read(embedding), folder.read(_USUAL_HEAD)):
            raise UserError(
                f"{folder.path}: {_USUAL_HEAD} differs from {embedding}, but {CONFIG} says that "
                'they are tied; it needs "tie_word_embeddings": false'
            )
        expected.add(_USUAL_HEAD)
    folder.check(expected)


def lazy_chunk(folder: Folder, rule: Rule) -> LazyChunk:
    """Return the chunk of Megatron-LM's tensor that a rule makes of a folder's tensors.

    Raises UserError where their shapes are not those of config.json.
    """
    # Tensors without content: a transform that does not fit fails before anything is written.
    parts: list[Tensor] = []
    for name, rows in zip(rule.names, rule.transform.rows, strict=True):
        shape, dtype = folder.shape(name)
        require(
            dtype in WEIGHT_DTYPES,
            f"{folder.path}: {name} is {dtype}; a weight is {' or '.join(map(str, WEIGHT_DTYPES))}",
        )
        _check_rows(folder, name, shape[-1:] if rule.transform.is_transposed else shape[:1], rows,
                    rule.transform.is_padded)  # fmt: skip
        part = torch.empty(shape, dtype=dtype, device="meta")
        parts.append(part)
        require(
            (part.shape[1:], dtype) == (parts[0].shape[1:], parts[0].dtype),
            f"{folder.path}: {name} is {list(shape)} {dtype} and does not fit {rule.names[0]}, "
            f"{list(parts[0].shape)} {parts[0].dtype}",
        )
    try:
        whole = rule.transform.to_megatron(parts)
    except RuntimeError:
        raise UserError(
            f"{folder.path}: {rule.names[0]} is {list(parts[0].shape)}, not of the model's shape"
        ) from None

    def make() -> Tensor:
        return rule.transform.to_megatron([folder.read(name) for name in rule.names])

    target, shape = rule.target, tuple(whole.shape)
    return LazyChunk(target.key, *target.block(shape), (*target.leading, *shape), whole.dtype, make)


def _check_rows(
    folder: Folder, name: str, stored: tuple[int, ...], rows: int, is_padded: bool
) -> None:
    padded = rows
    if is_padded:
        multiple = Entries(folder.config, CONFIG).integer(_PADDING, 1)
        padded = -(-rows // multiple) * multiple
    if stored in ((rows,), (padded,)):
        return
    message = f"{folder.path}: {name} has {[*stored, 'no'][0]} rows; {CONFIG} says {rows}"
    if is_padded and stored > (rows,):
        message += f" (vocab_size); rows without tokens need {_PADDING} there"
    raise UserError(message)


def lazy_tensors(
    reader: CheckpointReader, rules: Sequence[Rule], dtype: torch.dtype | None
) -> list[LazyTensors]:
    """Return Hugging Face's tensors of a checkpoint's, in this dtype or, if None, in theirs.

    Raises UserError where their shapes are not the model's.
    """
    by_names = groupby(rules, key=lambda rule: rule.names)
    return [_lazy_tensors(reader, names, list(shares), dtype) for names, shares in by_names]


def _lazy_tensors(
    reader: CheckpointReader, names: tuple[str, ...], shares: list[Rule], dtype: torch.dtype | None
) -> LazyTensors:
    wanted = dtype or reader.dtype(shares[0].target)

    def concatenated(parts: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        columns = zip(*parts, strict=True)
        wholes = (column[0] if len(column) == 1 else torch.cat(column) for column in columns)
        return {name: whole.to(wanted) for name, whole in zip(names, wholes, strict=True)}

    def make() -> dict[str, Tensor]:
        return concatenated(
            [rule.transform.to_hugging_face(reader.read(rule.target)) for rule in shares]
        )

    outlines = []
    for rule in shares:
        shape = reader.shape(rule.target)
        try:
            outlines.append(rule.transform.to_hugging_face(torch.empty(shape, device="meta")))
        except (RuntimeError, IndexError):
            raise UserError(
                f"{reader.path}: {rule.target.key} is {list(shape)}, which is not the model's: "
                f"{list(rule.transform.rows)} rows"
            ) from None
    return LazyTensors(concatenated(outlines), make)
