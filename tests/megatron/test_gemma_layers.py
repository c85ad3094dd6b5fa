"""Parts of Gemma 3's layers by arguments. Logits are in tests/conversion."""

from argparse import Namespace
from types import SimpleNamespace

import torch

from megatron_lowbit.megatron.layers.specs import use_gemma_layers
from tests.megatron.test_compatibility import USUAL


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
