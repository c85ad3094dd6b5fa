"""Description of a family of models: its config.json and its tensors, each written once.

A family's table of entries reads a config.json into Megatron-LM's arguments, and writes one from
them.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import FEATURES, MOST_EXPERTS, MOST_LAYERS
from megatron_lowbit.conversion.mapping import Model, Rule, TensorTable, expand
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries


class Entry(NamedTuple):
    """Entry of config.json that holds an argument: its key, and how it is read and written."""

    key: str
    read: Callable[[Entries], Any]
    write: Callable[[Any], Any] = lambda value: value


def integer(
    key: str, default: int | Callable[[Entries], int] | None = None, **limits: int
) -> Entry:
    """Return an entry that is an integer within limits; the default may depend on other entries."""

    def read(entries: Entries) -> int:
        other = default(entries) if callable(default) else default
        return entries.integer(key, other, **limits)

    return Entry(key, read)


def positive_number(key: str, default: float) -> Entry:
    """Return an entry that is a number above 0."""
    return Entry(key, lambda entries: entries.number(key, default, above=0))


def untied(default: bool) -> Entry:
    """Return the entry whose negation is ``--untie-embeddings-and-output-weights``."""
    key = "tie_word_embeddings"
    return Entry(key, lambda entries: not entries.boolean(key, default), lambda value: not value)


def query_groups(entries: Entries) -> int:
    """Return the number of heads of key and value."""
    heads = entries.integer("num_attention_heads")
    groups = entries.integer("num_key_value_heads", heads)
    rule = f"must divide num_attention_heads {heads}"
    require(heads % groups == 0, f"{CONFIG}: num_key_value_heads {groups}: {rule}")
    return groups


def experts(key: str, default: Callable[[Entries], int | None] = lambda entries: None) -> Entry:
    """Return an entry that is the number of a layer's experts."""

    def read(entries: Entries) -> int:
        layers = entries.integer("num_hidden_layers", most=MOST_LAYERS)
        return entries.integer(key, default(entries), most=MOST_EXPERTS // layers)

    return Entry(key, read)


def experts_of_a_token(experts: Entry) -> Entry:
    """Return the entry that is the number of experts that each token goes to."""
    key = "num_experts_per_tok"
    return Entry(key, lambda entries: entries.integer(key, most=experts.read(entries)))


_WINDOW, _FULL = "sliding_attention", "full_attention"


def window(default: int) -> Entry:
    """Return the entry that is the number of tokens to attend to, with the token itself."""
    key = "sliding_window"
    return Entry(key, lambda entries: (entries.integer(key, default) - 1, 0), lambda w: w[0] + 1)


def windows(read: Callable[[Entries], list[int]]) -> Entry:
    """Return the entry that says which layers have a window, read as 1 or 0 for each layer."""
    return Entry("layer_types", read, lambda pattern: [(_FULL, _WINDOW)[has] for has in pattern])


def layers_with_windows(entries: Entries) -> list[int]:
    """Return 1 for each layer with a window, 0 for the others; by default every second."""
    layers = entries.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = entries.strings("layer_types") or [(_WINDOW, _FULL)[i % 2] for i in range(layers)]
    message = f"layer_types must be {_WINDOW!r} or {_FULL!r} for each of {layers} layers"
    require(len(kinds) == layers and {*kinds} <= {_WINDOW, _FULL}, f"{CONFIG}: {message}")
    return [int(kind == _WINDOW) for kind in kinds]


def check_window(model: Model, family: str) -> None:
    """Raise UserError for a window that reaches ahead."""
    _, after = size = model["window_size"]
    require(after == 0, f"the model has window_size {size}; a {family} has 0 tokens ahead")


class ConvertibleModel(NamedTuple):
    """A model of a family.

    Attributes:
        name: the family's.
        model: Megatron-LM's arguments that describe the model.
        config: Hugging Face's config.json.
        rules: mapping of its tensors.
        left_out: starts of the names of tensors that are not converted.
    """

    name: str
    model: Model
    config: Mapping[str, Any]
    rules: list[Rule]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A kind of models.

    Attributes:
        name: the family's, for people.
        architecture: ``architectures`` in config.json.
        model_type: ``model_type`` in config.json.
        arguments: Megatron-LM's arguments that all models of the family have.
        fixed: entries of config.json with the only value that is converted, also by default.
        entries: Megatron-LM's arguments with their entries of config.json.
        tensors: table of tensors of a model.
        is_transposed: whether Hugging Face stores the weights of linear layers as (in, out).
        more_arguments: function that reads arguments which are no entry of their own.
        more_entries: function that writes entries which are no argument of their own, and checks
            the model.
        left_out: function that returns the starts of the names of tensors that are not converted.
        defaults: what transformers takes for entries that a config.json lacks, where it is not the
            default of the entry itself.
    """

    name: str
    architecture: str
    model_type: str
    arguments: Mapping[str, Any]
    fixed: Mapping[str, Any]
    entries: Mapping[str, Entry]
    tensors: Callable[[Model], TensorTable]
    is_transposed: bool = False
    more_arguments: Callable[[Entries], dict[str, Any]] = lambda entries: {}
    more_entries: Callable[[Model], dict[str, Any]] = lambda model: {}
    left_out: Callable[[Entries], tuple[str, ...]] = lambda entries: ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def from_config(self, config: dict[str, Any]) -> ConvertibleModel:
        """Return the model that a config.json describes.

        Raises UserError for what Megatron-LM's model cannot do.
        """
        for key, value in self.fixed.items():
            if config.get(key, value) != value:
                shown = reprlib.repr(config[key])
                raise UserError(f"{CONFIG}: {key} {shown}: only {value!r} is converted")
        entries = Entries({**self.defaults, **config}, CONFIG)
        model = {name: entry.read(entries) for name, entry in self.entries.items()}
        model = {**self.arguments, **model, **self.more_arguments(entries)}
        left_out = self.left_out(entries)
        return ConvertibleModel(self.name, model, config, self.rules(model), left_out)

    def to_config(self, model: Model) -> dict[str, Any]:
        """Build a config.json for a trained model.

        Raises UserError where one of the model's arguments is not the family's.
        """
        others = {name: usual for name, usual in FEATURES.items() if name not in self.entries}
        check_arguments(model, self.name, {**others, **self.arguments})
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.fixed,
            **{entry.key: entry.write(model.get(name)) for name, entry in self.entries.items()},
            **self.more_entries(model),
        }

    def rules(self, model: Model) -> list[Rule]:
        """Return the mapping of a model's tensors."""
        return expand(self.tensors(model), model, self.is_transposed)


def check_arguments(model: Model, family: str, wanted: Mapping[str, Any]) -> None:
    """Raise UserError where one of a model's arguments is not what its family needs."""
    for name, value in wanted.items():
        actual = model.get(name, FEATURES.get(name))
        if actual != value:
            raise UserError(f"the model has {name} {actual!r}; a {family} has {value!r}")
