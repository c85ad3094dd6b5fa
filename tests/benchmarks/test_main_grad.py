"""The benchmark of sums with main gradients: what it computes, and its bound."""

import pytest
import torch

from benchmarks import main_grad
from benchmarks.timing import Ceilings

LIMITS = Ceilings(1e9, {"bf16": 1e12}, {})


def test_rows_and_bounds(monkeypatch):
    """Bounds of the ways that a GEMM is asked for, and the reason of one that refuses."""
    asked = set()

    def multiply(a, b, factor, out_dtype, out, adds):
        if a.dtype is not torch.bfloat16:
            raise RuntimeError("no FP8")
        asked.add((out_dtype, adds))

    monkeypatch.setattr(main_grad, "scaled_matmul", multiply)
    size = main_grad.Size(64, 32, 16)
    rows = main_grad.run(size, list(main_grad.CONTENDERS), LIMITS, 1e-6)
    bf16, fp8 = rows[:3], rows[3:]
    assert asked == {
        (torch.bfloat16, False), (torch.float32, False), (torch.float32, True)
    }  # fmt: skip
    assert [row["bound_ms"] for row in bf16] == pytest.approx(
        [1e3 * bytes_ * 32 * 16 / 1e9 for bytes_ in (2, 4, 8)], abs=1e-4
    )
    assert all(row["median_ms"] > 0 for row in bf16)
    assert {row["refused"] for row in fp8} == {"RuntimeError: no FP8"}
    one = main_grad.run(size._replace(tokens=2**20), ["BF16, added"], LIMITS, 1e-6)
    assert one[0]["bound_ms"] == pytest.approx(1e3 * 2 * 2**20 * 32 * 16 / 1e12, rel=1e-3)


@pytest.mark.gpu
def test_every_way_runs():
    for contender in main_grad.CONTENDERS.values():
        main_grad.product(main_grad.Size(64, 128, 64), *contender)(lambda: None)
