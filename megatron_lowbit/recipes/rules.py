"""Layer rules: ordered matchers, first match wins, on block positions and module names."""

import fnmatch
import re
from dataclasses import dataclass
from fractions import Fraction


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


Extent = int | Fraction
"""A number of blocks, or a fraction of all of them."""


def count_blocks(extent: Extent | None, num_blocks: int) -> int:
    """How many blocks an extent means: a fraction f of L blocks is max(1, round(f * L))."""
    if extent is None:
        return 0
    return max(1, round(extent * num_blocks)) if isinstance(extent, Fraction) else extent


@dataclass(frozen=True)
class BlockRule:
    """Matches the first and the last blocks of the model."""

    name: str
    config: str
    first: Extent | None = None
    last: Extent | None = None

    def matches(self, layer: Layer) -> bool:
        """Whether the layer lies in the first or last blocks."""
        first, last = (count_blocks(e, layer.num_blocks) for e in (self.first, self.last))
        return layer.block < first or layer.block >= layer.num_blocks - last


@dataclass(frozen=True)
class GlobRule:
    """Matches module paths by a shell pattern, as megatron-core's matcher does."""

    name: str
    config: str
    pattern: str

    def matches(self, layer: Layer) -> bool:
        """Whether the whole path fits the pattern."""
        return fnmatch.fnmatchcase(layer.path, self.pattern)


@dataclass(frozen=True)
class RegexRule:
    """Matches module paths by a regular expression, anywhere in the path."""

    name: str
    config: str
    pattern: str

    def matches(self, layer: Layer) -> bool:
        """Whether the expression is found in the path."""
        return re.search(self.pattern, layer.path) is not None


Rule = BlockRule | GlobRule | RegexRule
