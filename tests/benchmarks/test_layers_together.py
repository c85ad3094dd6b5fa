"""Benchmarks of experts and of small models: their contenders run, on a CPU as well."""

import pytest

from benchmarks import experts, small_models, timing


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
    limits = timing.Ceilings(1.0, {}, {})
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
