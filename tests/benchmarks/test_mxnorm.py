"""The benchmark of MXNorm: its contenders compute the same, its parts run on a CPU."""

import sys

import pytest
import torch

from benchmarks import mxnorm, timing
from benchmarks.timing import Ceilings

SMALL = """--hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128
    --seq-length 32 --max-position-embeddings 32 --quantization-engine reference"""
LIMITS = Ceilings(4.0e12, {}, {})


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(mxnorm, "SECONDS", 1e-6)
    monkeypatch.setattr(mxnorm, "FLUSH_BYTES", 0)


def test_gradients_are_autograd_s():
    """Gradients of x over its RMS, in float64; contenders compute in FP32 and round to BF16."""
    draws = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(16, 96, generator=draws).bfloat16() for _ in range(2))
    x, grad = x.to(timing.device()), grad.to(timing.device())
    exact = x.double().requires_grad_()
    rho = exact.square().mean(-1, keepdim=True).rsqrt()
    (exact * rho).backward(grad.double())
    contenders = mxnorm.gradients(96)
    assert [*contenders] == ["kernel", "torch", "torch.compile"]
    del contenders["torch.compile"]  # of the same function, and takes seconds
    for run in contenders.values():
        made = run(grad, x, rho.detach().float()).double()
        assert ((made - exact.grad).abs() <= 2.0**-8 * exact.grad.abs() + 1e-5).all()


@pytest.mark.parametrize("norm", mxnorm.NORMS)
@pytest.mark.parametrize("case", ["E4M3, B = 32", "NVFP4"])
def test_kernels_normalize_and_cast(case, norm):
    """To half a step of E4M3 at most, and of E2M1; MXNorm estimates the RMS to a few percent."""
    x = torch.randn(8, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = x.to(timing.device())
    made, _ = mxnorm._kernel(case, norm, x)()
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    error = (made.dequantize().double() - exact).norm() / exact.norm()
    assert error < (0.12 if case == "NVFP4" else 0.05)


def test_backward_is_set_against_its_bytes(monkeypatch):
    """6 bytes per value and 4 per row, at 4 TB/s."""
    contenders = mxnorm.gradients(64)
    monkeypatch.setattr(mxnorm, "gradients", lambda hidden: {"torch": contenders["torch"]})
    (row,) = mxnorm.backward_rows(4096, 64, LIMITS)
    assert (row["case"], row["tokens"], row["hidden"]) == ("norm_grad", 4096, 64)
    assert row["bytes"] == 6 * 4096 * 64 + 4 * 4096
    assert row["expected_ms"] == pytest.approx(row["bytes"] / 4e9, abs=5e-5)
    assert row["of_copy"] == pytest.approx(row["expected_ms"] / row["median_ms"], abs=6e-3)


def test_ratios_of_a_part():
    times = {"kernel": 1.0, "torch": 9.0, "torch.compile": 1.5}
    rows = [
        {"part": "backward", "case": "norm_grad", "hidden": 64, "tokens": 8, "contender": name,
         "median_ms": ms}
        for name, ms in times.items()
    ]  # fmt: skip
    assert mxnorm.speedups(rows, "backward", "norm_grad", "kernel", "torch") == {(64, 8): 9.0}
    assert mxnorm.summary(rows).row_count == 2


def test_layers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setattr(mxnorm, "MODEL", [*mxnorm.MODEL, *SMALL.split()])
    for name, value in (("TOKENS", [32]), ("BATCHES", (2,)), ("RECIPES", ("mxfp8",))):
        monkeypatch.setattr(mxnorm, name, value)
    monkeypatch.setattr(mxnorm, "LAYERS", 1)
    (rows,) = mxnorm.measure(LIMITS, ["layer"])
    assert {row["contender"] for row in rows} == {"MXNorm", "RMSNorm"}
    assert all(row["median_ms"] > 0 and row["tokens"] == 32 for row in rows)
    assert not torch.distributed.is_initialized()
