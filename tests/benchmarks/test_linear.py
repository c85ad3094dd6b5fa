"""Benchmarks of linear layers, experts and small models: contenders run, on a CPU as well."""

import pytest

from benchmarks import experts, host_time, linear, small_models
from benchmarks.timing import Ceilings
from megatron_lowbit.kernels import compiled

LIMITS = Ceilings(4.0e12, {"bf16": 1e14, "fp8 per row": 1e14, "fp8 per tensor": 1e14}, {})


def test_recipes_run(monkeypatch):
    """With one scale from a history, and with random numbers; on a CPU by the reference.

    It needs nothing compiled, which would take 20 s here.
    """
    monkeypatch.setattr(compiled, "missing_compiler", lambda: "none, says the test")
    names = ["BF16", "fp8-delayed", "mxfp4-backward"]
    rows = linear.run(linear.Size(64, 64, 64), names, LIMITS, 1e-6)
    assert [row["contender"] for row in rows] == names
    assert all(row["both"]["median_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_rows_and_their_ratios():
    rows = host_time.run(["BF16", "fp8-tile", "nvfp4"], turns=3)
    assert [row["contender"] for row in rows] == ["BF16", "fp8-tile", "nvfp4"]
    assert all(row["median_us"] >= row["fastest_us"] > 0 for row in rows)
    assert rows[0]["times_bf16"] == 1
    for row in rows:
        assert abs(row["times_bf16"] - row["median_us"] / rows[0]["median_us"]) < 0.01
        assert "times_te_bf16" not in row


def test_skewed_tokens():
    tokens = experts.Size(128, 32768, 2048, 768, 1).tokens_per_expert()
    assert sum(tokens) == 32768 and not any(count % 16 for count in tokens)
    assert tokens[0] >= 32768 // 2 and tokens.count(0) == 32


def test_kernels_in_the_order_of_a_call():
    calls = [[("a", 1.0), ("b", 5.0)], [("a", 2.0), ("b", 4.0)], [("a", 9.0), ("b", 3.0)]]
    assert experts.in_order([one for call in calls for one in call]) == [("a", 2.0), ("b", 4.0)]
    assert experts.in_order([("a", 1.0)] * 3 * (experts.MOST_KERNELS + 1)) == []
    assert experts.in_order([]) == []


@pytest.mark.slow
def test_experts_and_their_ratios():
    limits = Ceilings(1.0, {}, {})
    size = experts.Size(4, 256, 64, 128, 1)
    rows = experts.run(size, ["BF16", "fp8-tile", "nvfp4, kept"], limits, 0.001)
    assert [row["contender"] for row in rows] == ["BF16", "fp8-tile", "nvfp4, kept"]
    assert rows[0]["as_fast_as_bf16"] == 1
    assert all(row["forward_ms"] > 0 and row["cpu_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_widths_and_their_ratios():
    rows = small_models.run(small_models.Shape(64, 128), ["BF16", "nvfp4"])
    assert [row["contender"] for row in rows] == ["BF16", "nvfp4"]
    assert rows[1]["as_fast_as_bf16_ms"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"], abs=1e-3)
    assert small_models.table(rows).row_count == 1
