"""The benchmark of a linear layer: its recipes run, on a CPU as well."""

from benchmarks import linear
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
