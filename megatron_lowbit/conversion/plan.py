"""What a family of models says: which tensors of the one side make which of the other.

A :class:`Rule` is one tensor of Megatron's, or one layer's part of a tensor that holds those of all
layers, and the Hugging Face tensors that it is made of.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lowbit.conversion.joins import Join


class Place(NamedTuple):
    """A part of a tensor of Megatron's: ``index`` in leading axes of the lengths ``of``."""

    key: str
    index: tuple[int, ...] = ()
    of: tuple[int, ...] = ()


class Rule(NamedTuple):
    """A part of Megatron's is these tensors of Hugging Face's, joined."""

    place: Place
    names: tuple[str, ...]
    join: Join


class Family(NamedTuple):
    """One kind of model, of one size.

    ``model`` is its shape in the words of this project's arguments, as ``lowbit.json`` keeps it;
    ``config`` is Hugging Face's config.json.
    """

    name: str
    model: dict
    config: dict
    rules: Sequence[Rule]
