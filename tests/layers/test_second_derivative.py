"""A second derivative, as of a penalty on gradients, is an error and never missing."""

import pytest
import torch
from one_layer import ENGINE, leaves, precision_of

from megatron_lowbit.layers import (
    GroupContext,
    LinearContext,
    lowbit_grouped_linear,
    lowbit_linear,
    lowbit_mlp,
)
from megatron_lowbit.layers.cross_entropy import cross_entropy
from megatron_lowbit.layers.mxnorm import mxnorm_linear

CONTEXT = LinearContext(precision_of("mxfp8"), ENGINE, key=3)
X, WEIGHT, _ = leaves(32, 64, 64)
LAYERS = {
    "linear": lambda: lowbit_linear(X, WEIGHT, CONTEXT),
    "grouped": lambda: lowbit_grouped_linear(X, [WEIGHT], [CONTEXT], [32], [None]),
    "grouped together": lambda: lowbit_grouped_linear(
        X, [WEIGHT], GroupContext(CONTEXT, [1]), [32], [None]
    ),
    "mlp": lambda: lowbit_mlp(X, WEIGHT, WEIGHT[:, :32], CONTEXT, CONTEXT),
    "mxnorm": lambda: mxnorm_linear(X, torch.ones(64), WEIGHT, CONTEXT),
    "cross_entropy": lambda: cross_entropy(X * 1, torch.zeros(32, dtype=torch.long), None),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_penalty_on_a_gradient_is_refused(layer):
    loss = layer().sum()  # The gradient of a sum has no graph.
    [gradient] = torch.autograd.grad(loss, X, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (X.sum() + gradient.square().sum()).backward()
