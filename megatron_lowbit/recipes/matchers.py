"""Matchers: select linear layers for a config, by the position of their block or by path.

A recipe's matchers are tried in order, and the first that matches a layer decides.
"""

import fnmatch
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import SchemaError, SchemaValidator, core_schema

from megatron_lowbit.recipes.yaml_reader import Integer, StrictModel

KINDS = {"moe": "experts", "attention": "attention", "mamba": "mixer", "mlp": "mlp"}
"""Kinds of blocks, and the part of a module path that tells them; the first that fits."""


OUTPUT_LAYER = "output_layer"
"""Path of a model's output layer, whose config a recipe names by the key ``output_layer``."""


class Layer(NamedTuple):
    """A linear layer as matchers see it.

    ``path`` is its module path with **global** layer numbers, such as
    ``decoder.layers.5.mlp.linear_fc1``; ``block`` counts from 0 over the whole model of
    ``num_blocks`` blocks. A block is a GPT layer with its four linears, or one block of a hybrid.
    """

    path: str
    block: int
    num_blocks: int

    @classmethod
    def output(cls, num_blocks: int) -> "Layer":
        """Return the output layer of a model, which is in no block and comes after the last."""
        return cls(OUTPUT_LAYER, num_blocks, num_blocks)

    @property
    def is_output(self) -> bool:
        """True for the output layer, which no matcher sees."""
        return self.path == OUTPUT_LAYER

    @property
    def kind(self) -> str:
        """The kind of block that the layer is in: a key of ``KINDS``, or ``other``."""
        return next((kind for kind, part in KINDS.items() if part in self.path), "other")


def _extent(value: Any) -> Any:
    if isinstance(value, int | Fraction) and not isinstance(value, bool) and value >= 0:
        return value
    with suppress(ValueError, ZeroDivisionError):
        text = str(value)
        # Through float: the exact fraction of 1e-99999999999 has no end.
        fraction = Fraction(text if "/" in text else str(float(text)))
        if 0 < fraction <= 1 and not isinstance(value, bool | int):
            return fraction
    raise ValueError(f"{value!r} is neither a number of blocks nor a fraction such as 2/62 or 0.1")


Extent = Annotated[int | Fraction, BeforeValidator(_extent)]
"""A number of blocks, or a fraction of all of them."""


def count_blocks(extent: int | Fraction | None, num_blocks: int) -> int:
    """Return an extent as a number of L blocks: for a fraction f, max(1, round(f * L))."""
    if extent is None:
        return 0
    return max(1, round(extent * num_blocks)) if isinstance(extent, Fraction) else extent


class _Matcher(StrictModel):
    config: str  # name of the config that a matching layer gets
    enabled: bool  # otherwise the matcher is ignored


class BlocksMatcher(_Matcher):
    """Matches layers by the position and the kind of their block.

    A layer must be in one of the places and of one of the kinds; what is not given does not count.
    """

    type: Literal["blocks"] = "blocks"
    first: Extent | None = None  # blocks of the model
    last: Extent | None = None
    # From 0; negative ones from the end (-1 is the last).
    numbers: tuple[Integer, ...] | None = None
    kinds: tuple[Literal[tuple(KINDS)], ...] | None = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _selects(self) -> "BlocksMatcher":
        if self.first is None and self.last is None and not self.numbers and not self.kinds:
            raise ValueError("give first, last, numbers or kinds, or remove the matcher")
        return self

    def matches(self, layer: Layer) -> bool:
        """Check whether the layer is of the kinds and in the blocks."""
        if self.kinds and layer.kind not in self.kinds:
            return False
        if self.first is None and self.last is None and not self.numbers:
            return True
        first, last = (count_blocks(e, layer.num_blocks) for e in (self.first, self.last))
        from_end = layer.num_blocks - layer.block  # 0 and less for multi-token prediction
        numbers = {n + layer.num_blocks if n < 0 else n for n in self.numbers or ()}
        is_last = last > 0 and from_end <= last
        return layer.block < first or is_last or layer.block in numbers


class GlobMatcher(_Matcher):
    """Matches whole module paths by a shell pattern, as megatron-core's matcher does."""

    type: Literal["glob"] = "glob"
    # Python's translation of a pattern is quadratic in its length.
    pattern: Annotated[str, Field(max_length=1000)]

    def matches(self, layer: Layer) -> bool:
        """Check whether the whole path fits the pattern."""
        return fnmatch.fnmatchcase(layer.path, self.pattern)


@lru_cache(maxsize=256)
def _path_expression(pattern: str) -> SchemaValidator:
    """Compile a regular expression; ValueError for look-around, a backreference, or a large one.

    The engine is pydantic's, the regex crate of Rust. Its time is linear in the path's length and
    its compiled size is limited, where a pattern can keep Python's ``re`` busy for years.
    """
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(
            f"{pattern!r} is not a regular expression: "
            f"{reason.removeprefix('SchemaError: ').removeprefix('error: ')}"
        ) from None


class RegexMatcher(_Matcher):
    """Matches module paths by a regular expression, anywhere in the path."""

    type: Literal["regex"] = "regex"
    pattern: Annotated[str, AfterValidator(lambda text: _path_expression(text) and text)]

    def matches(self, layer: Layer) -> bool:
        """Check whether the expression is found in the path."""
        return _path_expression(self.pattern).isinstance_python(layer.path)


Matcher = Annotated[BlocksMatcher | GlobMatcher | RegexMatcher, Field(discriminator="type")]
