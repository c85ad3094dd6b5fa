"""Benchmarks of linear layers and small models: contenders run, on a CPU as well."""

import pytest

from benchmarks import host_time, linear, small_models
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


@pytest.mark.slow
def test_widths_and_their_ratios():
    rows = small_models.run(small_models.Shape(64, 128), ["BF16", "nvfp4"])
    assert [row["contender"] for row in rows] == ["BF16", "nvfp4"]
    assert rows[1]["as_fast_as_bf16_ms"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"], abs=1e-3)
    assert small_models.table(rows).row_count == 1
