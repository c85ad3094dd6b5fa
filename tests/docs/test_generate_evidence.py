"""The tables of studies on docs/research/evidence.md."""

import math

import pytest
from evidence import restored, table

from megatron_lowbit.analysis.comparison import Contender, compare


@pytest.fixture
def contender():
    def build(name: str, loss: float, *validation: float) -> Contender:
        kept = {"every": 1, "tokens": 2000, "losses": [loss] * 20}
        curves = [restored(kept | {"validation_loss": one}) for one in validation]
        return Contender(name, tuple(curves))

    return build


def test_perplexity_is_beside_the_loss(contender):
    found = [contender("BF16", 2.0, math.log(3), math.log(5)), contender("own", 2.2, math.log(7))]
    head, _, first, second = table(compare(found), found).splitlines()
    assert head.endswith(
        "| final loss | gap at the end | grown since before the decay | perplexity |"
    )
    assert first == "| BF16 | 2 | 2.0000 ± 0.0000 |  |  | 4.000 ± 1.414 |"
    assert second.startswith("| own | 1 | 2.2000 | +10.00% ") and second.endswith("| 7.000 |")
