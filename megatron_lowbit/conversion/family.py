"""Description of a family of models: its config.json and its tensors, each written once.

A family's table of entries reads a config.json into Megatron-LM's arguments, and writes one from
them.
"""

import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import FEATURES, MOST_EXPERTS, MOST_LAYERS
from megatron_lowbit.conversion.mapping import Model, Names, Rule, expand
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries


class Entry(NamedTuple):
    """Entry of config.json that holds an argument: its key, and how it is read and written."""

    key: str
    read: Callable[[Entries], Any]
    write: Callable[[Any], Any] = lambda value: value


def integer(key: str, default: int | None = None, **limits: int) -> Entry:
    """Return an entry that is an integer within limits."""
    return Entry(key, lambda entries: entries.integer(key, default, **limits))


def positive_number(key: str, default: float | None = None) -> Entry:
    """Return an entry that is a number above 0."""
    return Entry(key, lambda entries: entries.number(key, default, above=0))


def boolean(key: str, default: bool) -> Entry:
    """Return an entry that is a truth value."""
    return Entry(key, lambda entries: entries.boolean(key, default), bool)


def untied(default: bool) -> Entry:
    """Return the entry whose negation is ``--untie-embeddings-and-output-weights``."""
    key = "tie_word_embeddings"
    return Entry(key, lambda entries: not entries.boolean(key, default), lambda value: not value)


def number_of_layers(entries: Entries) -> int:
    """Return the number of a model's layers."""
    return entries.integer("num_hidden_layers", maximum=MOST_LAYERS)


def query_groups(entries: Entries) -> int:
    """Return the number of heads of key and value."""
    heads = entries.integer("num_attention_heads")
    groups = entries.integer("num_key_value_heads", heads)
    rule = f"must divide num_attention_heads {heads}"
    require(heads % groups == 0, f"{CONFIG}: num_key_value_heads {groups}: {rule}")
    return groups


def experts(key: str, other_key: str = "") -> Entry:
    """Return an entry that is the number of a layer's experts, under either key."""

    def read(entries: Entries) -> int:
        default = entries.integer(other_key, 0, minimum=0) if other_key else 0
        return entries.integer(
            key, default or None, maximum=MOST_EXPERTS // number_of_layers(entries)
        )

    return Entry(key, read)


def experts_of_a_token(experts: Entry, minimum: int = 1) -> Entry:
    """Return the entry that is the number of experts that each token goes to."""
    key = "num_experts_per_tok"
    return Entry(key, lambda entries: entries.integer(key, None, minimum, experts.read(entries)))


_WINDOW, _FULL = "sliding_attention", "full_attention"
_ALL_TOKENS = 2**31 - 1
"""Window of a model that has none."""


def window(default: int = _ALL_TOKENS) -> Entry:
    """Return the entry that is the number of tokens to attend to, with the token itself."""
    key = "sliding_window"

    def read(entries: Entries) -> tuple[int, int] | None:
        tokens = entries.integer(key, default)
        return None if tokens == _ALL_TOKENS else (tokens - 1, 0)

    return Entry(key, read, lambda window: window and window[0] + 1)


def windows(usual: Callable[[Entries], Sequence[bool]]) -> Entry:
    """Return the entry that says which layers have a window, read as 1 or 0 for each layer.

    ``usual`` gives the layers that have one in a config.json without the entry.
    """
    key = "layer_types"

    def read(entries: Entries) -> list[int]:
        layers = number_of_layers(entries)
        types = entries.strings(key) or [(_FULL, _WINDOW)[has] for has in usual(entries)]
        message = f"{key} must be {_WINDOW!r} or {_FULL!r} for each of {layers} layers"
        require(len(types) == layers and {*types} <= {_WINDOW, _FULL}, f"{CONFIG}: {message}")
        return [int(type == _WINDOW) for type in types]

    return Entry(key, read, lambda pattern: pattern and [(_FULL, _WINDOW)[has] for has in pattern])


def _with_infinity(value: Any) -> Any:
    """Return an entry, with infinity for the object that transformers writes for it in a list."""
    if not isinstance(value, list):
        return value
    return [math.inf if part == {"__float__": "Infinity"} else part for part in value]


_FIXED = {"is_causal": True, "per_layer_config": None}
"""Entries of any family's config.json with the only value that is converted."""


class ConvertibleModel(NamedTuple):
    """A model of the family ``name``: Megatron-LM's arguments, and the mapping of its tensors.

    ``ignored`` are starts of the names of tensors that are not converted.
    """

    name: str
    model: Model
    rules: list[Rule]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Models with the same entries of config.json and the same names of tensors.

    Attributes:
        name: the family's, for people.
        architecture: ``architectures`` in config.json.
        model_type: ``model_type`` in config.json.
        arguments: Megatron-LM's arguments that all models of the family have, or functions that
            compute them from the arguments of ``entries``, which take precedence.
        fixed: entries of config.json with the only value that is converted, also by default.
        entries: Megatron-LM's arguments with their entries of config.json.
        outer: tensors outside the layers, the embedding first.
        layers: tensors of a layer, as :func:`~mapping.expand` takes them, or a function that
            returns them for a model.
        prefix: start of Hugging Face's names before the number of a layer.
        blocks: layers of Megatron-LM in one of Hugging Face's.
        is_transposed: True if Hugging Face stores the weights of linear layers as (in, out).
        more_arguments: function that reads arguments which are no entry of their own.
        more_entries: function that writes entries which are no argument of their own, and checks
            the model.
        defaults: transformers' values of entries that a config.json lacks, where they differ from
            the default of the entry itself.
    """

    name: str
    architecture: str
    model_type: str
    arguments: Mapping[str, Any]
    fixed: Mapping[str, Any]
    entries: Mapping[str, Entry]
    outer: Names
    layers: Names | Callable[[Model], Names | Sequence[Names]]
    prefix: str = "model.layers"
    blocks: int = 1
    is_transposed: bool = False
    more_arguments: Callable[[Entries], dict[str, Any]] = lambda entries: {}
    more_entries: Callable[[Model], dict[str, Any]] = lambda model: {}
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def variant(
        self,
        names: Sequence[str] = (),
        *,
        without: Collection[str] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
        entries: Mapping[str, Entry] = MappingProxyType({}),
        **changes: Any,
    ) -> Self:
        """Return a family with more arguments and entries, ``without`` some of this one's.

        ``names`` are its name, architecture and model_type.
        """
        changes |= zip(("name", "architecture", "model_type"), names, strict=False)
        for key, more in (("arguments", arguments), ("entries", entries)):
            base = {k: v for k, v in getattr(self, key).items() if k not in without}
            changes[key] = {**base, **more}
        return replace(self, **changes)

    def from_config(self, config: dict[str, Any]) -> ConvertibleModel:
        """Return the model that a config.json describes.

        Raises UserError for what Megatron-LM's model cannot do.
        """
        for key, value in (_FIXED | {**self.fixed}).items():
            given = _with_infinity(config.get(key, value))
            # Null has the effect of false or 0, but not of any other value.
            if given != value and (given is not None or value):
                shown = reprlib.repr(given)
                raise UserError(f"{CONFIG}: {key} {shown}: only {value!r} is converted")
        entries = Entries({**self.defaults, **config}, CONFIG)
        model = {name: entry.read(entries) for name, entry in self.entries.items()}
        model = {**self._usual(model), **model, **self.more_arguments(entries)}
        # DeepSeek's files have layers for multi-token prediction behind the others.
        more = entries.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS)
        first = model["num_layers"]
        ignored = tuple(f"{self.prefix}.{layer}." for layer in range(first, first + more))
        return ConvertibleModel(self.name, model, self.rules(model), ignored)

    def to_config(self, model: Model) -> dict[str, Any]:
        """Build a config.json for a trained model.

        Raises UserError where one of the model's arguments is not the family's.
        """
        for name in ("num_experts", "hybrid_layer_pattern"):
            given = name in model or name not in self.entries
            require(given, f"the model has no {name}; a {self.name} has it")
        others = {name: usual for name, usual in FEATURES.items() if name not in self.entries}
        check_arguments(model, self.name, {**others, **self._usual(model)})
        if "window_size" in model:
            message = f"the model has window_size {model['window_size']}"
            tokens_ahead = model["window_size"][1]
            require(tokens_ahead == 0, f"{message}; a {self.name} has 0 tokens ahead")
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.fixed,
            **{entry.key: entry.write(model.get(name)) for name, entry in self.entries.items()},
            **self.more_entries(model),
        }

    def rules(self, model: Model) -> list[Rule]:
        """Return the mapping of a model's tensors."""
        layers = self.layers(model) if callable(self.layers) else self.layers
        return expand(self.outer, layers, model, self.prefix, self.blocks, self.is_transposed)

    def _usual(self, model: Model) -> dict[str, Any]:
        """Return the arguments that all models of the family have, for a model."""
        return {
            name: value(model) if callable(value) else value
            for name, value in self.arguments.items()
            if name not in self.entries
        }


def check_arguments(model: Model, family: str, wanted: Mapping[str, Any]) -> None:
    """Raise UserError where one of a model's arguments is not what its family needs."""
    for name, value in wanted.items():
        actual = model.get(name, FEATURES.get(name))
        if actual != value:
            raise UserError(f"the model has {name} {actual!r:.200}; a {family} has {value!r}")
