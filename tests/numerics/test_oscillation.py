"""Measurement of oscillating weights: by hand, and in exact fractions."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from megatron_lowbit.numerics.oscillation import OscillationReset, WeightPaths


def test_ratios_by_hand():
    """Crossing a middle back and forth; moving with its value; a value that stays; no motion."""
    weights = [[0.4, 0.0, 0.1, 7.0], [0.6, 1.0, 0.2, 7.0], [0.4, 2.0, 0.3, 7.0]]
    quantized = [[0.0, 0.0, 0.0, 7.0], [1.0, 1.0, 0.0, 8.0], [0.0, 2.0, 0.0, 7.0]]
    paths = WeightPaths(torch.empty(4))
    for weight, value in zip(weights, quantized, strict=True):
        paths.advance(torch.tensor(weight), torch.tensor(value))
    assert paths.ratio().tolist() == pytest.approx([2 / 0.4, 1.0, 0.0, 0.0])
    assert paths.quantized.tolist() == quantized[-1]


def test_ratios_in_fractions():
    generator = torch.Generator().manual_seed(0)
    # Few bits: sums of differences are exact in FP32.
    steps = [torch.randint(-64, 64, (40,), generator=generator) / 8 for _ in range(6)]
    paths = WeightPaths(torch.empty(40))
    for weight in steps:
        paths.advance(weight, weight.round())
    exact = [[Fraction(x) for x in step.tolist()] for step in steps]
    values = [[Fraction(round(x)) for x in step] for step in exact]  # to even, as torch
    for number, ratio in enumerate(paths.ratio().tolist()):
        ways = [
            sum(abs(after[number] - before[number]) for before, after in pairwise(path))
            for path in (exact, values)
        ]
        assert ratio == pytest.approx(float(ways[1] / ways[0]) if ways[0] else 0.0, rel=1e-7)


def test_a_weight_that_changes_in_place_has_moved():
    weight, paths = torch.zeros(1), WeightPaths(torch.empty(1))
    for value in (0.0, 1.0, 3.0):
        paths.advance(weight.fill_(value), weight.round())
    assert paths.of_weight.item() == paths.of_quantized.item() == 3.0


def test_times():
    """The paper's 70M run: 50 iterations from 8000 on, every 200."""
    reset = OscillationReset(8000, 200)
    steps = [reset.step(i, 12505) for i in (0, 7999, 8000, 8001, 8050, 8051, 8199, 8200, 8450)]
    assert steps == [None, None, 0, 1, 50, None, None, 0, 50]
    share = OscillationReset(0.64, 5, over=2)
    assert [share.step(i, 100) for i in range(62, 71)] == [None] * 2 + [0, 1, 2, None, None, 0, 1]
    assert OscillationReset(0, 5, 2).step(0, 100) == 0
    assert "0.64 of the run" in str(share) and "iteration 8000" in str(reset)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"start": -1}, "start -1"), ({"start": 1.5}, "start 1.5"), ({"over": 200}, "over 200"),
        ({"over": 0}, "over 0"), ({"ratio": 0}, "ratio 0"),
        *(({"start": value}, "start (inf|nan) is neither") for value in (math.inf, math.nan)),
        *(({"ratio": value}, "ratio (inf|nan) is not") for value in (math.inf, math.nan)),
    ],
)  # fmt: skip
def test_what_is_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        OscillationReset(**{"start": 1, "period": 200} | wrong)
