"""Torch's Adam and norms with Transformer Engine's interfaces, on machines without CUDA."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.cpu_runtime.megatron_patches import (
    GroupStepAdam,
    ZeroCenteredRMSNorm,
    build_norm,
)

# isort: split
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.transformer.torch_norm import WrappedTorchNorm

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="replaces classes without CUDA")


def build(normalization: str, zero_centered: bool, sequence_parallel: bool = False):
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        sequence_parallel=sequence_parallel,
    )
    return build_norm(WrappedTorchNorm, config, hidden_size=8, eps=1e-3)


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


@on_a_cpu
def test_megatrons_class_builds_them():
    config = SimpleNamespace(
        normalization="RMSNorm", layernorm_zero_centered_gamma=True, sequence_parallel=True
    )
    assert isinstance(WrappedTorchNorm(config, 8), ZeroCenteredRMSNorm)


# -- Adam ------------------------------------------------------------------------------------------


@on_a_cpu
def test_megatrons_optimizers_take_this_adam():
    assert optimizer.Adam is distrib_optimizer.Adam is GroupStepAdam
    assert distrib_optimizer.USING_TE_OPTIMIZER


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    draws = torch.Generator().manual_seed(1)
    shapes = [(5, 3), (7,), ()]
    return [torch.nn.Parameter(torch.randn(s, generator=draws).to(dtype)) for s in shapes]


def train(steps: int, *sides: tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]) -> None:
    """Update the parameters of all optimizers with the same gradients."""
    draws = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for number in range(len(sides[0][1])):
            gradient = torch.randn(sides[0][1][number].shape, generator=draws)
            for _, owned in sides:
                owned[number].grad = gradient.to(owned[number].dtype)
        for stepping, _ in sides:
            stepping.step()


@pytest.mark.parametrize(
    ("adam_w_mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs_to_the_bit(adam_w_mode, reference, weight_decay):
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    ours, theirs = parameters(), parameters()
    own = GroupStepAdam(ours, adam_w_mode=adam_w_mode, capturable=True, **settings)
    other = reference(theirs, **settings)
    train(5, (own, ours), (other, theirs))
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(own.state[mine][name], other.state[expected][name])


def test_adam_counts_steps_in_its_groups():
    first, second, third = parameters()
    adam = GroupStepAdam([{"params": [first, second]}, {"params": [third], "lr": 0.5}], lr=0.1)
    train(3, (adam, [first, second, third]))
    assert [group["step"] for group in adam.param_groups] == [3, 3]
    assert all(state.keys() == {"exp_avg", "exp_avg_sq"} for state in adam.state.values())


def test_adam_goes_on_from_its_state():
    """The step in a checkpoint is a tensor."""
    whole, half = parameters(), parameters()
    adam, before = GroupStepAdam(whole, lr=0.1), GroupStepAdam(half, lr=0.1)
    train(2, (adam, whole), (before, half))
    state = before.state_dict()
    state["param_groups"][0]["step"] = torch.tensor(2)
    resumed = GroupStepAdam(half, lr=0.1)
    resumed.load_state_dict(state)
    train(2, (adam, whole), (resumed, half))
    assert all(torch.equal(one, other) for one, other in zip(whole, half, strict=True))
    assert resumed.param_groups[0]["step"] == 4


def test_adam_does_not_change_parameters_without_gradients():
    ours = parameters()
    before = ours[1].detach().clone()
    adam = GroupStepAdam(ours, lr=0.1)
    ours[0].grad = torch.ones_like(ours[0])
    adam.step()
    assert torch.equal(ours[1], before) and ours[1] not in adam.state
    with pytest.raises(ValueError, match="closure"):
        adam.step(lambda: 0.0)
