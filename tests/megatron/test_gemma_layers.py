"""Parts of Gemma 3's layers by arguments. Logits are in tests/conversion."""

from argparse import Namespace
from types import SimpleNamespace

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention

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


def test_rotary_embeddings_of_windows_rotate_as_much_as_the_others(monkeypatch):
    model = SimpleNamespace(transformer=None, transformer_layer_spec=get_gpt_layer_local_spec())
    use_gemma_layers(
        model, Namespace(**USUAL | {"window_rotary_base": 1000, "rotary_percent": 0.5})
    )
    spec = model.transformer_layer_spec(model, None).submodules.self_attention
    config = SimpleNamespace(
        window_size=(4, 0), window_attn_skip_freq=None, kv_channels=16, rotary_interleaved=True,
        use_cpu_initialization=True,
    )  # fmt: skip
    monkeypatch.setattr(
        SelfAttention, "__init__", lambda self, *_, **__: torch.nn.Module.__init__(self)
    )
    attention = spec.module(config, spec.submodules, 1, **spec.params)
    expected = RotaryEmbedding(
        16, rotary_percent=0.5, rotary_interleaved=True, rotary_base=1000,
        use_cpu_initialization=True,
    )  # fmt: skip
    assert torch.equal(attention.window_rotary(8), expected(8))
