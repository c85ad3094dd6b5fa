"""The convolution and scan of a Mamba-2 mixer, forward and backward: torch against mamba-ssm.

    python -m benchmarks scan

BF16 inputs, a mixer of the 8B hybrid's size. ``error`` is the largest difference of the output and
of the input's gradient from torch's in FP32, over the largest value there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import runner, timing
from benchmarks.timing import Ceilings, Step
from megatron_lowbit.megatron.layers.hybrid import convolve_and_scan, torch_scan, triton_scan


class Size(NamedTuple):
    """Sizes of the inputs and of the mixer."""

    batch: int
    tokens: int
    heads: int
    head_dim: int
    groups: int
    states: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens} tokens, {self.heads} heads of {self.head_dim}"


SIZES = [
    Size(2, 4096, 128, 64, 8, 128),
    Size(1, 8192, 128, 64, 8, 128),
    Size(8, 1024, 32, 64, 8, 128),
]
SCANS: dict[str, Callable] = {"torch": torch_scan, "mamba-ssm": triton_scan}


class Mixer(NamedTuple):
    """Parameters of a scan."""

    conv_weight: Tensor
    conv_bias: Tensor
    dt_bias: Tensor
    a: Tensor
    d: Tensor

    def __call__(self, x: Tensor, scan: Callable, size: Size) -> Tensor:
        return convolve_and_scan(
            x, *self, chunk_size=128, ngroups=size.groups, scan=scan, headdim=size.head_dim
        )


def _mixer(size: Size) -> Mixer:
    new = {"device": timing.device()}
    channels = size.heads * size.head_dim + 2 * size.groups * size.states
    return Mixer(
        0.3 * torch.randn(channels, 4, dtype=torch.bfloat16, **new),
        torch.zeros(channels, dtype=torch.bfloat16, **new),
        torch.rand(size.heads, **new) * 4 - 6,
        -torch.rand(size.heads, **new) * 15 - 1,
        torch.ones(size.heads, **new),
    )


def run(size: Size, names: Sequence[str], limits: Ceilings, seconds: float) -> list[dict]:
    """Return a row for each scan: times, tokens/s, errors; or why it refuses."""
    mixer, inner = _mixer(size), size.heads * size.head_dim
    width = 2 * inner + 2 * size.groups * size.states + size.heads
    shape = (size.batch, size.tokens)
    x = torch.randn(*shape, width, dtype=torch.bfloat16, device=timing.device())
    grad = torch.randn(*shape, inner, dtype=torch.bfloat16, device=timing.device())
    exact = _results(mixer, x.float(), grad.float(), torch_scan, size)

    def row(name: str, laps: list[list[float]]) -> dict:
        results = _results(mixer, x, grad, SCANS[name], size)
        errors = [
            round(float((result.float() - other).abs().max() / other.abs().max()), 5)
            for result, other in zip(results, exact, strict=True)
        ]
        times = timing.phases(laps)
        rate = round(size.batch * size.tokens / times["both"]["median_ms"] * 1e3)
        return {"error": errors, **times, "tokens_per_s": rate}

    builders = {name: partial(_step, mixer, x, grad, SCANS[name], size) for name in names}
    return runner.rows_of(builders, row, {"size": list(size)}, seconds)


def _step(mixer: Mixer, x: Tensor, grad: Tensor, scan: Callable, size: Size) -> Step:
    leaf = x.clone().requires_grad_()

    def step(mark: timing.Mark) -> None:
        leaf.grad = None
        y = mixer(leaf, scan, size)
        mark()
        y.backward(grad)

    return step


def _results(
    mixer: Mixer, x: Tensor, grad: Tensor, scan: Callable, size: Size
) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    if x.dtype is torch.float32:
        mixer = mixer._replace(
            conv_weight=mixer.conv_weight.float(), conv_bias=mixer.conv_bias.float()
        )
    y = mixer(leaf, scan, size)
    y.backward(grad)
    return y.detach(), leaf.grad


COLUMNS = {
    "forward ms": "forward", "both ms": "both", "tokens/s": "tokens_per_s", "error": "error",
}  # fmt: skip
main = runner.over_sizes("scan", __doc__, SCANS, SIZES, run, COLUMNS)
