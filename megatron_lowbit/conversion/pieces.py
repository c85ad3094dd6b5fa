"""Tensors by the rules of a family, in either direction: shapes first, contents on demand.

Whatever does not fit is found here, from the shapes alone, before anything is written.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from megatron_lowbit.conversion.hugging_face_files import CONFIG, WEIGHT_DTYPES, Folder, Made
from megatron_lowbit.conversion.megatron_files import Tensors
from megatron_lowbit.conversion.megatron_writer import Piece, piece_at
from megatron_lowbit.conversion.plan import Family, Rule
from megatron_lowbit.conversion.tensor_transforms import Cut
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_USUAL_HEAD = "lm_head.weight"
_PADDING = "pad_vocab_size_multiple"
"""The entry of config.json by which a model says that its vocabulary has rows without tokens."""


def check_names(folder: Folder, family: Family) -> None:
    """Raise UserError where a folder's tensors are not those of the model.

    Tied, a model may hold its embedding again as ``lm_head.weight``.
    """
    names = {rule.place.key: rule.names[0] for rule in family.rules}
    head = names.get(_HEAD)
    if head and head not in folder.file_of:
        raise UserError(
            f"{folder.path}: no tensor {head}, but {CONFIG} says that embedding and output are "
            'not tied; "tie_word_embeddings": true takes the embedding for both'
        )
    expected = {name for rule in family.rules for name in rule.names}
    if not head and _USUAL_HEAD in folder.file_of:
        embedding = names[_EMBEDDING]
        folder.check(expected | {_USUAL_HEAD})
        if not torch.equal(folder.read(embedding), folder.read(_USUAL_HEAD)):
            raise UserError(
                f"{folder.path}: {_USUAL_HEAD} differs from {embedding}, but {CONFIG} says that "
                'they are tied; it needs "tie_word_embeddings": false'
            )
        expected.add(_USUAL_HEAD)
    folder.check(expected)


def piece(folder: Folder, rule: Rule) -> Piece:
    """Return the piece that a rule makes of a folder's tensors.

    Raises UserError where their shapes are not those of config.json.
    """
    shapes = [folder.shape(name) for name in rule.names]
    for name, (shape, dtype), rows in zip(rule.names, shapes, rule.join.rows, strict=True):
        require(
            dtype in WEIGHT_DTYPES,
            f"{folder.path}: {name} is {dtype}; a weight is {' or '.join(map(str, WEIGHT_DTYPES))}",
        )
        _check_rows(folder, name, shape, rows, is_vocabulary=isinstance(rule.join, Cut))
        require(
            (shape[1:], dtype) == (shapes[0][0][1:], shapes[0][1]),
            f"{folder.path}: {name} is {list(shape)} {dtype} and does not fit {rule.names[0]}, "
            f"{list(shapes[0][0])} {shapes[0][1]}",
        )
    sized = zip(rule.join.rows, shapes, strict=True)
    parts = [(rows, *shape[1:]) for rows, (shape, _) in sized]
    try:
        whole = rule.join.shape(parts)
        # Tensors without content: a join that cannot be is found before anything is written.
        joined = rule.join.join([torch.empty(shape, device="meta") for shape in parts])
        fits = joined.shape == whole
    except RuntimeError:
        fits = False
    require(
        fits, f"{folder.path}: {rule.names[0]} is {list(shapes[0][0])}, not of the model's shape"
    )

    def make() -> Tensor:
        parts = zip(rule.names, rule.join.rows, strict=True)
        return rule.join.join([folder.read(name)[:rows] for name, rows in parts])

    return piece_at(rule.place, whole, shapes[0][1], make)


def _check_rows(
    folder: Folder, name: str, shape: tuple[int, ...], rows: int, is_vocabulary: bool
) -> None:
    padded = rows
    if is_vocabulary:
        multiple = Entries(folder.config, CONFIG).integer(_PADDING, 1)
        padded = -(-rows // multiple) * multiple
    if shape[:1] in ((rows,), (padded,)):
        return
    found = f"{folder.path}: {name} has {shape[0] if shape else 'no'} rows; {CONFIG} says {rows}"
    if is_vocabulary and shape and shape[0] > rows:
        found += f" (vocab_size); rows without tokens need {_PADDING} there"
    raise UserError(found)


def made(tensors: Tensors, rules: Sequence[Rule], dtype: torch.dtype | None) -> list[Made]:
    """Plan the tensors that rules make of a checkpoint's, in this dtype or, if None, in theirs.

    Raises UserError where their shapes are not the model's.
    """
    by_names = groupby(rules, key=lambda rule: rule.names)
    return [_made(tensors, names, list(shares), dtype) for names, shares in by_names]


def _made(
    tensors: Tensors, names: tuple[str, ...], shares: list[Rule], dtype: torch.dtype | None
) -> Made:
    shapes, dtype = [], dtype or tensors.dtype(shares[0].place)
    for rule in shares:
        shape = tensors.shape(rule.place)
        try:
            # Tensors without content: what is made of them has the shapes to come.
            parts = rule.join.split(torch.empty(shape, device="meta"))
        except RuntimeError:
            parts = []
        is_short = isinstance(rule.join, Cut) and shape[0] < rule.join.rows[0]
        if is_short or len(parts) != len(names):
            raise UserError(
                f"{tensors.path}: {rule.place.key} is {list(shape)}, which is not the model's: "
                f"{list(rule.join.rows)} rows"
            )
        shapes.append([tuple(part.shape) for part in parts])
    rows = [sum(shape[0] for shape in parts) for parts in zip(*shapes, strict=True)]
    joined = [(n, *first[1:]) for n, first in zip(rows, shapes[0], strict=True)]

    def make() -> list[Tensor]:
        parts = [rule.join.split(tensors.read(rule.place)) for rule in shares]
        whole = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return [tensor.to(dtype) for tensor in whole]

    return Made(names, joined, [dtype] * len(names), make)
