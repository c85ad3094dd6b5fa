"""The tables of studies on docs/research/evidence.md."""

import math

import numpy as np
import pytest
from evidence import STUDIES, by_seed, commands_of, contenders_of, restored, table, text_of
from leaderboard import curve_of, stored_curve

from megatron_lowbit.analysis.comparison import Contender, compare
from megatron_lowbit.study.definition import read_study


@pytest.fixture
def contender():
    def build(name: str, loss: float, *validation: float) -> Contender:
        kept = {"every": 1, "tokens": 2000, "losses": [loss] * 20}
        curves = [restored(kept | {"validation_loss": one}) for one in validation]
        return Contender(name, tuple(curves), tuple(range(len(curves))))

    return build


def test_validation_is_beside_the_loss(contender):
    found = [contender("BF16", 2.0, math.log(3), math.log(5)), contender("own", 2.2, math.log(7))]
    head, _, first, second = table(compare(found), found).splitlines()
    assert head.endswith("| growth in the decay | validation gap | perplexity |")
    assert first == "| BF16 | 2 | 2.0000 ± 0.0000 |  |  |  | 4.000 ± 1.414 |"
    assert second.startswith("| own | 1 | 2.2000 | +10.00% ") and second.endswith("| 7.000 |")
    gap = math.log(7) / math.log(3) - 1  # of the seed that both have
    assert f"| {100 * gap:+.2f}% |" in second


def test_runs_of_other_lengths_have_no_gap(contender):
    base, longer = contender("NVFP4", 2.0, 1.0), contender("MXFP4", 1.9, 1.0)
    tokens = 1.1 * longer.curves[0].tokens
    longer = longer._replace(curves=(longer.curves[0]._replace(tokens=tokens),))
    *_, row = text_of("nvfp4-token-budgets", [base, longer]).splitlines()
    assert row == "| MXFP4 | 1 | 1.9000 |  |  |  | 2.718 |"


def test_a_row_inside_is_a_second_reference(contender):
    found = [
        contender(name, loss, 1.0) for name, loss in (("BF16", 2.0), ("NVFP4", 2.2), ("x", 3.3))
    ]
    head, _, *rows = table(compare(found), found).splitlines()
    assert head.endswith("| relative to NVFP4 |")
    ends = [row.split(" | ")[-1].split("%")[0] for row in rows]
    assert ends == ["-9.09", " |", "+50.00"]


def test_rates_have_a_line_each(contender):
    names = ("RMSNorm, 2^-9", "RMSNorm, 2^-3", "MXNorm p = 2, 2^-9", "MXNorm p = 2, 2^-3")
    found = [contender(name, 2.0 + at, 1.0) for at, name in enumerate(names)]
    head, _, *lines = text_of("mxnorm-lr", found).splitlines()
    assert head == "| learning rate | RMSNorm | MXNorm p = 2 |"
    assert lines == ["| 2^-9 | 2.000 | 4.000 |", "| 2^-3 | 3.000 | 5.000 |"]


def test_a_branch_keeps_its_iterations(contender):
    """Its final loss is a share of the whole run's iterations."""
    whole = contender("NVFP4", 2.0, 1.0).curves[0]
    branch = whole._replace(iterations=whole.iterations + 40, tokens=50.0 * (whole.iterations + 40))
    again = curve_of(stored_curve(branch))
    assert np.array_equal(again.iterations, branch.iterations)
    assert np.array_equal(again.tokens, branch.tokens)


def test_a_run_of_two_studies_counts_once():
    names = {"nvfp4-blocks": "last 2", "nvfp4-combinations": "last blocks in BF16"}
    commands = {name: commands_of(read_study(STUDIES / f"{name}.yaml")) for name in names}
    run = {"every": 1, "tokens": 20, "losses": [2.0] * 20, "validation_loss": 2.0}
    kept = {study: [run | {"name": name, "seed": 3}] for study, name in names.items()}
    assert [one.seeds for one in contenders_of("nvfp4-blocks", commands, kept)] == [(3,)]


def test_differences_by_seed(contender):
    """A seed that one of them lacks is ignored."""
    base, other = contender("NVFP4", 2.0, 1.0, 1.0, 1.0), contender("switched", 1.99, 1.01, 0.99)
    head, _, row = by_seed([base, other]).splitlines()
    assert head == "|  | seed 0 | seed 1 | mean | validation |"
    assert row == "| switched | -0.500% | -0.500% | -0.500% ± 0.000 | +0.000% ± 1.000 |"
