"""torch's norms in the place of Transformer Engine's, on machines without CUDA."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.megatron import cpu_norm

# isort: split
from megatron.core.transformer.torch_norm import WrappedTorchNorm


def build(normalization: str, zero_centered: bool, sequence_parallel: bool = False):
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        sequence_parallel=sequence_parallel,
    )
    return cpu_norm.build(WrappedTorchNorm, config, hidden_size=8, eps=1e-3)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("normalization", "reference"),
    [("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)],
)
def test_norms_and_their_gains(normalization, reference, zero_centered):
    norm, expected = build(normalization, zero_centered), reference(8, eps=1e-3)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=draws)
    torch.testing.assert_close(norm(x), expected(x))
    # Training starts at a gain of 1 in either form.
    assert (norm.weight == (0 if zero_centered else 1)).all()
    for own, other in zip(norm.parameters(), expected.parameters(), strict=True):
        change = torch.randn(8, generator=draws)
        own.data += change
        other.data += change
    torch.testing.assert_close(norm(x), expected(x))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_say_whether_they_see_a_part_of_the_tokens(sequence_parallel):
    norm = build("LayerNorm", False, sequence_parallel)
    marks = [parameter.sequence_parallel for parameter in norm.parameters()]
    assert marks == [sequence_parallel] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces a class where CUDA is absent")
def test_megatrons_class_builds_them():
    config = SimpleNamespace(
        normalization="RMSNorm", layernorm_zero_centered_gamma=True, sequence_parallel=True
    )
    assert isinstance(WrappedTorchNorm(config, 8), cpu_norm.ZeroCenteredRMSNorm)
