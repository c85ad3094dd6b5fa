"""Description of a family of models: which tensors of one side make which of the other.

A :class:`Rule` is one tensor of Megatron-LM, or one layer's part of a tensor of all layers, and the
Hugging Face tensors that it is made of.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_lowbit.conversion.tensor_transforms import Join
from megatron_lowbit.errors import UserError

MOST_LAYERS = 2**10
MOST_EXPERTS = 2**17
"""The most experts that all layers have together."""


class Place(NamedTuple):
    """Part of a tensor of Megatron-LM: ``index`` in leading axes of the lengths ``of``."""

    key: str
    index: tuple[int, ...] = ()
    of: tuple[int, ...] = ()


class Rule(NamedTuple):
    """Part of a tensor of Megatron-LM, as a join of Hugging Face's tensors ``names``.

    The rules of one tensor's shares (:class:`~megatron_lowbit.conversion.tensor_transforms.Share`)
    have the same ``names`` and follow one another in the order of the rows.
    """

    place: Place
    names: tuple[str, ...]
    join: Join


class Family(NamedTuple):
    """One kind of model, of one size.

    ``model`` holds Megatron-LM's arguments that describe the model, by their attributes' names;
    ``config`` is Hugging Face's config.json.
    """

    name: str
    model: dict
    config: dict
    rules: Sequence[Rule]


def as_named(family: Family, found: Container[str]) -> Family:
    """Return the family with the names of ``found``, where these lack a common first part.

    GPT-2's own files do: ``h.0.ln_1.weight`` for ``transformer.h.0.ln_1.weight``.
    """
    short = [
        rule._replace(names=tuple(name.partition(".")[2] for name in rule.names))
        for rule in family.rules
    ]
    if family.rules[0].names[0] in found or short[0].names[0] not in found:
        return family
    return family._replace(rules=short)


def check_model(model: Mapping[str, Any], kind: str, wanted: Mapping[str, Any]) -> None:
    """Raise UserError where one of a model's arguments is not what its family needs.

    Args:
        model: arguments as in :class:`Family`.
        kind: name of the family with its article, for the message.
        wanted: needed values by argument.
    """
    for key, good in wanted.items():
        if model[key] != good:
            raise UserError(f"the model has {key} {model[key]!r}; {kind} has {good!r}")
