"""Layer rules: ordered matchers, first match wins, on block positions and module names."""

import fnmatch
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

KINDS = {"moe": "experts", "attention": "attention", "mamba": "mixer", "mlp": "mlp"}
"""Kinds of blocks, and what a module path holds in one; the first that fits."""


@dataclass(frozen=True)
class Layer:
    """A linear layer as rules see it.

    ``path`` is its module path with **global** layer numbers, such as
    ``decoder.layers.5.mlp.linear_fc1``; ``block`` counts from 0 over the whole model of
    ``num_blocks`` blocks. A block is a GPT layer with its four linears, or one block of a hybrid.
    """

    path: str
    block: int
    num_blocks: int

    @property
    def kind(self) -> str:
        """What the layer is part of: a key of ``KINDS``, or ``other``."""
        return next((kind for kind, part in KINDS.items() if part in self.path), "other")


Extent = int | Fraction
"""A number of blocks, or a fraction of all of them."""


def count_blocks(extent: Extent | None, num_blocks: int) -> int:
    """How many blocks an extent means: a fraction f of L blocks is max(1, round(f * L))."""
    if extent is None:
        return 0
    return max(1, round(extent * num_blocks)) if isinstance(extent, Fraction) else extent


@dataclass(frozen=True)
class BlockRule:
    """Matches the first and the last blocks of the model and those of given numbers.

    Numbers count from 0, negative ones from the end (-1 is the last). ``kinds`` keeps only layers
    of these kinds; without any position, all blocks are meant.
    """

    name: str
    config: str
    first: Extent | None = None
    last: Extent | None = None
    numbers: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()

    def matches(self, layer: Layer) -> bool:
        """Whether the layer is of the kinds and in the blocks."""
        if self.kinds and layer.kind not in self.kinds:
            return False
        if self.first is None and self.last is None and not self.numbers:
            return True
        first, last = (count_blocks(e, layer.num_blocks) for e in (self.first, self.last))
        return (
            layer.block < first
            or layer.block >= layer.num_blocks - last
            or layer.block in self.numbers
            or layer.block - layer.num_blocks in self.numbers
        )

    def outside(self, num_blocks: int) -> list[int]:
        """The numbers that no block of the model has."""
        return [number for number in self.numbers if not -num_blocks <= number < num_blocks]


@dataclass(frozen=True)
class GlobRule:
    """Matches module paths by a shell pattern, as megatron-core's matcher does."""

    name: str
    config: str
    pattern: str

    def matches(self, layer: Layer) -> bool:
        """Whether the whole path fits the pattern."""
        return fnmatch.fnmatchcase(layer.path, self.pattern)


@lru_cache(maxsize=256)
def path_expression(pattern: str) -> SchemaValidator:
    """Compile a regular expression that paths are searched with.

    The engine is pydantic's, the regex crate of Rust. Its time is linear in the path's length and
    its compiled size is limited, where a pattern can keep Python's ``re`` busy for years.

    Raises:
        ValueError: no regular expression, look-around, a backreference, or too large.
    """
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(
            f"{pattern!r} is not a regular expression: "
            f"{reason.removeprefix('SchemaError: ').removeprefix('error: ')}"
        ) from None


@dataclass(frozen=True)
class RegexRule:
    """Matches module paths by a regular expression, anywhere in the path."""

    name: str
    config: str
    pattern: str

    def matches(self, layer: Layer) -> bool:
        """Whether the expression is found in the path."""
        return path_expression(self.pattern).isinstance_python(layer.path)


Rule = BlockRule | GlobRule | RegexRule
