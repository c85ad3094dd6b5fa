"""The benchmark of a layer's CPU time: its contenders run, on a CPU as well."""

import pytest

from benchmarks import host_time


@pytest.mark.slow
def test_rows_and_their_ratios():
    rows = host_time.run(["BF16", "fp8-tile", "nvfp4"], turns=3)
    assert [row["contender"] for row in rows] == ["BF16", "fp8-tile", "nvfp4"]
    assert all(row["median_us"] >= row["fastest_us"] > 0 for row in rows)
    assert rows[0]["times_bf16"] == 1
    for row in rows:
        assert abs(row["times_bf16"] - row["median_us"] / rows[0]["median_us"]) < 0.01
        assert "times_te_bf16" not in row
