"""Two processes: gradients of the operation against its steps, one after another.

The file is its own worker.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lowbit.collectives.all_reduce_norm import AllReduceNorm, Result, all_reduce_rms_norm
from megatron_lowbit.numerics import FORMATS, Quantizer, Request
from megatron_lowbit.numerics.rmsnorm import RMSNorm

RANKS, SHAPE, EPS = 2, (6, 2, 64), 1e-5


class Reduce(torch.autograd.Function):
    """A row-parallel layer's all-reduce: nothing in backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def gradients(function, tensors, grads):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    outputs = function(*tensors)
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, tensors, grads)]


def worker(rendezvous: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    draws = torch.Generator().manual_seed(1)
    xs = torch.randn(RANKS, *SHAPE, generator=draws)
    residual, *grads = torch.randn(3, *SHAPE, generator=draws)
    gain = torch.randn(SHAPE[-1], generator=draws)
    run = AllReduceNorm(dist.group.WORLD, capacity=0)
    assert run.choice == "torch.distributed and separate kernels: not every rank has a GPU"

    def fused(x, residual, gain):
        return all_reduce_rms_norm(run, x, residual, gain, EPS)[:2]

    def steps(x, residual, gain):
        total = Reduce.apply(x) + residual
        return torch.nn.functional.rms_norm(total, gain.shape, gain, EPS), total

    tensors = (xs[rank], residual, gain)
    pairs = zip(gradients(fused, tensors, grads), gradients(steps, tensors, grads), strict=True)
    for seen, expected in pairs:
        error = (seen - expected).abs().max() / expected.abs().max()
        assert error <= 2e-6, error
    quantized(run, xs, rank)
    dist.destroy_process_group()


def quantized(run: AllReduceNorm, xs: torch.Tensor, rank: int) -> None:
    """Check codes of the sum, which nobody keeps; then in BF16 with rows, into the same tensors."""
    x, quantizer = xs.flatten(1, -2), Quantizer(FORMATS["mxfp8-e4m3"])
    seen = run(x[rank], None, RMSNorm(EPS), None, Request(quantizer), keep_total=False)
    wanted = quantizer(RMSNorm(EPS).normalize(x[0] + x[1]))
    assert torch.equal(seen.quantized.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert seen.total is None and seen.normalized is None
    x = x.bfloat16()
    rows = RMSNorm(EPS).normalize((x[0].float() + x[1].float()).bfloat16()).bfloat16()
    out = Result(torch.empty_like(rows), seen.quantized)
    again = run(
        x[rank], None, RMSNorm(EPS), None, Request(quantizer), keep_normalized=True, out=out
    )
    assert again.normalized is out.normalized and torch.equal(out.normalized, rows)
    assert again.quantized is out.quantized
    wanted = quantizer(rows)
    assert torch.equal(out.quantized.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    refused(run, x[rank])


def refused(run: AllReduceNorm, x: torch.Tensor) -> None:
    """Check buffers that are unlike the result, and for what is not made."""
    for name, buffer in {
        "normalized": torch.empty_like(x, dtype=torch.float32),
        "total": torch.empty_like(x).t(),
        "quantized": Quantizer(FORMATS["mxfp8-e4m3"])(x),
    }.items():
        with pytest.raises(ValueError, match=rf"out\.{name}"):
            run(x, None, RMSNorm(EPS), None, out=Result(**{name: buffer}))
    request = Request(Quantizer(FORMATS["mxfp6-e2m3"]))
    other = Result(quantized=Quantizer(FORMATS["mxfp6-e3m2"])(x))
    with pytest.raises(ValueError, match="the call's mxfp6-e2m3"):
        run(x, None, RMSNorm(EPS), None, request, out=other)


@pytest.mark.slow
def test_gradients_are_those_of_the_steps(run_ranks, tmp_path):
    run_ranks(__file__, RANKS, tmp_path / "rendezvous", timeout=120)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    worker(sys.argv[1], int(sys.argv[2]))
