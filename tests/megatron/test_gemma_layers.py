"""Arguments for parts of Gemma 3's layers: what they refuse. Logits are in tests/conversion."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import compatibility
from megatron_lowbit.megatron.layers.specs import use_gemma_layers

USUAL = {
    "geglu": False, "sandwich_norm": False, "window_rotary_base": None, "swiglu": False,
    "squared_relu": False, "quick_geglu": False, "transformer_impl": "local", "mxnorm": False,
    "fused_allreduce_norm": False, "hybrid_layer_pattern": None, "context_parallel_size": 1,
    "position_embedding_type": "rope",
}  # fmt: skip


def apply(**changes: object) -> SimpleNamespace:
    """Return a configuration with the changes' parts."""
    transformer = SimpleNamespace(activation_func=None, gated_linear_unit=False)
    config = SimpleNamespace(transformer=transformer, transformer_layer_spec=None)
    use_gemma_layers(config, Namespace(**USUAL | changes))
    return config


def test_nothing_is_changed_unasked():
    config = apply()
    assert config.transformer.activation_func is None
    assert config.transformer_layer_spec is None


def test_the_gate_is_the_approximate_gelu():
    config = apply(geglu=True)
    x = torch.linspace(-4, 4, 101)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(config.transformer.activation_func(x), expected)
    assert config.transformer.gated_linear_unit
    assert not config.transformer.bias_activation_fusion


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"geglu": True, "swiglu": True}, "--geglu: the model has another activation"),
        ({"sandwich_norm": True, "transformer_impl": "transformer_engine"}, "transformer_engine"),
        ({"sandwich_norm": True, "fused_allreduce_norm": True}, "--fused-allreduce-norm"),
        ({"sandwich_norm": True, "mxnorm": True}, "--mxnorm"),
        ({"window_rotary_base": 10000, "context_parallel_size": 2}, "--context-parallel-size"),
        ({"window_rotary_base": 10000, "hybrid_layer_pattern": "M*"}, "--hybrid-layer-pattern"),
        ({"window_rotary_base": 10000, "position_embedding_type": "none"}, "needs --position-emb"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, named):
    compatibility.refuse(compatibility.gemma_layers(Namespace(**USUAL)))
    with pytest.raises(UserError, match=named):
        compatibility.refuse(compatibility.gemma_layers(Namespace(**USUAL | changes)))
