"""The benchmark of what the techniques of the MXFP4 paper cost."""

import pytest

from benchmarks import linear, mxfp4_overhead
from benchmarks.linear import Size, middle_precision
from benchmarks.timing import Ceilings


@pytest.mark.parametrize("name", mxfp4_overhead.VARIANTS)
def test_variants_lack_what_they_say(name):
    precision = middle_precision(mxfp4_overhead.VARIANTS[name])
    for gemm in (precision.dgrad, precision.wgrad):
        assert gemm.quantized and (gemm.hadamard is not None) == ("RHT" in name)
        for operand in (gemm.lhs, gemm.rhs):
            assert operand.format.name == "mxfp4"
            assert operand.rounding.value == ("stochastic" if "SR" in name else "nearest")
    assert not precision.fprop.quantized


def test_overheads_are_shares_of_the_time_without(monkeypatch):
    """Overheads of measured times, and of those counted in docs/recipes/mxfp4.md."""
    times = {"BF16": 20.0, "RHT and SR": 11.0, "SR": 10.0, "RHT": 8.0, "neither": 7.0}
    rows = [{"contender": name, "backward": {"median_ms": ms}} for name, ms in times.items()]
    monkeypatch.setattr(linear, "run", lambda *_: rows)
    # An H100: 3 TB/s, 1250 TFLOP/s in FP8.
    limits = Ceilings(3.0e12, {"bf16": 650e12, "fp8 per tensor": 1250e12}, {})
    size = Size(16384, 8192, 28672)
    (both,) = [row for row in mxfp4_overhead.run(size, [], limits, 0.1) if "overhead" in row]
    assert both["contender"] == "RHT and SR" and both["overhead"] == {"rht": 0.1, "sr": 0.375}
    # Two GEMMs; BF16 read twice, once for its amax, the kept input in 17/32 bytes; three operands
    # and a half in FP8.
    moved = 4 * (16384 * 28672 + 8192 * 28672) + 17 / 32 * 16384 * 8192
    moved += 2 * 16384 * 28672 + 8192 * 28672 + 16384 * 8192
    elements = 2 * 16384 * 28672 + 8192 * 28672 + 16384 * 8192
    least = 4 * 16384 * 8192 * 28672 / 1250e12 + moved / 3e12
    rht, sr = elements * 7 / 33.5e12, elements * 5 / 16.7e12
    counted = {"rht": rht / (least + sr), "sr": sr / (least + rht)}
    assert both["counted_overhead"] == pytest.approx(counted, abs=6e-5)
