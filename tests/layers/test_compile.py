"""torch.compile of a model with low-bit layers: the eager bits, in forward, gradients and draws."""

from functools import partial

import pytest
import torch
from torch import nn

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import linear, lowbit_linear
from megatron_lowbit.layers.mxnorm import mxnorm_linear
from megatron_lowbit.recipes import load_recipe

NVFP4 = load_recipe("nvfp4").configs["nvfp4"]
REFERENCE = ReferenceEngine("tests")


class Linear(nn.Module):
    """A layer that draws a new key in every call."""

    def __init__(self, columns: int, rows: int, product=lowbit_linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.product = partial(product, weight=self.weight, context=NVFP4)

    def forward(self, x):
        return self.product(x)


def train(model, compiled):
    """Return outputs and gradients of two passes."""
    torch.manual_seed(5)
    model.zero_grad()
    x = torch.randn(32, 64).requires_grad_()
    outputs = []
    for _ in range(2):
        y = compiled(x)
        y.square().sum().backward()
        outputs.append(y.detach())
    with torch.no_grad():
        outputs.append(compiled(x))
    return [*outputs, x.grad, *(p.grad.clone() for p in model.parameters())]


def check(model, **options):
    torch._dynamo.reset()
    expected = train(model, model)
    torch.testing.assert_close(
        train(model, torch.compile(model, **options)), expected, rtol=0, atol=0
    )


def mxnorm(x, weight, **options):
    """Return mXNorm's linear layer, with a gain of ones."""
    return mxnorm_linear(x, torch.ones(x.shape[-1]), weight, **options)


@pytest.fixture
def reference(monkeypatch):
    """Let layers take the reference engine, which compiles nothing itself."""
    monkeypatch.setattr(linear, "select_engine", lambda device: REFERENCE)


@pytest.mark.parametrize("product", [lowbit_linear, mxnorm])
def test_a_model(product, reference):
    """The compiler's own arithmetic stays out: relu and addition have one result."""
    torch.manual_seed(0)
    layers = Linear(64, 128), nn.ReLU(), Linear(128, 64, product)
    check(nn.Sequential(*layers), backend="aot_eager")


@pytest.mark.slow
def test_the_default_backend_and_engine():
    torch.manual_seed(0)
    check(nn.Sequential(Linear(64, 128), nn.ReLU(), Linear(128, 64)))


def test_no_break_allowed_is_an_error(reference):
    model = Linear(64, 32)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="lowbit_linear"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(16, 64))
