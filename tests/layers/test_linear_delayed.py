"""Delayed scaling in the linear layer: what is recorded, when, and what scales are made of it."""

import one_layer
import pytest
import torch
from one_layer import ENGINE, history, precision_of
from torch.utils.checkpoint import checkpoint

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.numerics import Hadamard, hadamard_transform
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.recipes import OPERANDS

M, N, K = 24, 40, 56
E4M3_MAX, E5M2_MAX = 448.0, 57344.0
DTYPES = {E4M3_MAX: torch.float8_e4m3fn, E5M2_MAX: torch.float8_e5m2}
MAXES = {"input": E4M3_MAX, "weight": E4M3_MAX, "grad": E5M2_MAX}


SHORT = "amax_history={length: 3, just_in_time: 2}"
HYBRID = precision_of("fp8-delayed", SHORT)
# dgrad's weight in another format than fprop's: else one weight serves both, and one is recorded.
ALL_SIX = precision_of("fp8-delayed", "dgrad.weight.scale_format=pow2", SHORT)


def leaves():
    return one_layer.leaves(M, N, K, seed=9)


def forward(x, weight, how, state):
    return lowbit_linear(x, weight, LinearContext(how, ENGINE, 1, amax_history=state))


def run(x, weight, dy, how, state):
    return one_layer.run(x, weight, dy, how, amax_history=state)


def amaxes(x, weight, dy):
    """Return the six operands' own, in the order of OPERANDS."""
    of = {"input": x, "weight": weight, "grad": dy}
    return torch.stack([of[role].detach().abs().max() for _, role in OPERANDS])


def fp8(t, amax, largest):
    """Quantize plainly to per-tensor FP8: t * (largest / amax) cast, saturating, and back."""
    scale = torch.tensor(largest) / amax
    codes = (t.detach() * scale).clamp(-largest, largest).to(DTYPES[largest])
    return codes.float() * (1.0 / scale)


def by_hand(x, weight, dy, of):
    """Return Y, dX, dW with each operand scaled by the amax that ``of`` has for it."""
    tensors = {"input": x, "weight": weight, "grad": dy}
    q = {
        operand: fp8(tensors[operand[1]], amax, MAXES[operand[1]])
        for operand, amax in zip(OPERANDS, of, strict=True)
    }
    return (
        q["fprop", "input"] @ q["fprop", "weight"].t(),
        q["dgrad", "grad"] @ q["dgrad", "weight"],
        q["wgrad", "grad"].t() @ q["wgrad", "input"],
    )


def assert_close(results, expected):
    """Compare to FP32 sums of at most 56 terms; another amax anywhere changes far more."""
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-4)


def test_just_in_time():
    """As long as too few steps are known, the scale is the tensor's own: current scaling's bits."""
    x, weight, dy = leaves()
    state = history(3)
    current = run(x, weight, dy, precision_of("fp8-delayed", "amax_history=null"), None)
    for _ in range(2):  # no step known, then one
        results = run(x, weight, dy, HYBRID, state)
        assert all(torch.equal(a, b) for a, b in zip(results, current, strict=True))
        assert_close(results, by_hand(x, weight, dy, amaxes(x, weight, dy)))
        state.advance(10 * amaxes(x, weight, dy))
    results = run(x, weight, dy, HYBRID, state)
    assert not any(torch.equal(a, b) for a, b in zip(results, current, strict=True))
    assert_close(results, by_hand(x, weight, dy, 10 * amaxes(x, weight, dy)))


def test_each_operand_has_its_own_history():
    """Six different ones, of which the largest counts; what exceeds it saturates."""
    x, weight, dy = leaves()
    state = history(3)
    factors = torch.tensor([0.5, 1.5, 3.0, 1.5, 0.7, 6.0])
    for factor in (0.1, 1.0, 0.9):
        state.advance(factor * factors * amaxes(x, weight, dy))
    results = run(x, weight, dy, HYBRID, state)
    assert_close(results, by_hand(x, weight, dy, factors * amaxes(x, weight, dy)))


def test_average():
    """Exponential, from the oldest: 2 / (3 + 1) for each newer one."""
    x, weight, dy = leaves()
    state = history(3)
    for factor in (5.0, 2.0, 1.0):  # no ratio of scales is a power of two, which moves no code
        state.advance(factor * amaxes(x, weight, dy))
    how = precision_of(
        "fp8-delayed", "amax_history={length: 3, algorithm: average, just_in_time: 3}"
    )
    mean = ((5.0 + 2.0) / 2 + 1.0) / 2
    results = run(x, weight, dy, how, state)
    assert_close(results, by_hand(x, weight, dy, mean * amaxes(x, weight, dy)))


# What is recorded


def test_all_six_are_recorded():
    """Forward records inputs and weights, backward gradients; finished steps do not move."""
    x, weight, dy = leaves()
    state = history()
    expected = amaxes(x, weight, dy)
    y = forward(x, weight, ALL_SIX, state)
    seen = [op for op in OPERANDS if op[1] != "grad"]
    assert [op for op, amax in zip(OPERANDS, state.step, strict=True) if amax >= 0] == seen
    y.backward(dy)
    assert torch.equal(state.step, expected)
    assert (state.entries < 0).all()


def test_a_weight_that_serves_both_is_recorded_once():
    x, weight, dy = leaves()
    state = history()
    run(x, weight, dy, HYBRID, state)
    unused = OPERANDS.index(("dgrad", "weight"))
    assert state.step[unused] < 0 and (state.step >= 0).sum() == 5


def test_microbatches_of_a_step():
    """The largest amax of the step is kept; the products do not depend on what came before."""
    x, weight, dy = leaves()
    state = history(3)
    for _ in range(2):
        state.advance(amaxes(x, weight, dy))
    first = run(x, weight, dy, ALL_SIX, state)
    run((3 * x).detach().requires_grad_(), weight, dy / 2, ALL_SIX, state)
    again = run(x, weight, dy, ALL_SIX, state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(state.step, amaxes(3 * x, weight, dy))


def test_evaluation_reads_and_does_not_write():
    x, weight, dy = leaves()
    state = history(3)
    for _ in range(2):
        state.advance(0.5 * amaxes(x, weight, dy))
    with torch.no_grad():
        y = forward(x, weight, HYBRID, state)
    assert (state.step < 0).all()
    expected = by_hand(x, weight, dy, 0.5 * amaxes(x, weight, dy))[0]
    assert_close([y], [expected])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_no_record(reentrant):
    x, weight, dy = leaves()
    state = history()
    y = checkpoint(lambda x: forward(x, weight, ALL_SIX, state), x, use_reentrant=reentrant)
    y.backward(dy)
    assert torch.equal(state.step, amaxes(x, weight, dy))


def test_gemms_that_do_not_run_record_nothing():
    """A frozen weight has no wgrad, an input without gradient no dgrad.

    Dgrad's weight is quantized with fprop's, for all microbatches.
    """
    x, weight, dy = leaves()
    for inputs, idle in (((x, weight.detach()), "wgrad"), ((x.detach(), weight), "dgrad")):
        state = history()
        forward(*inputs, ALL_SIX, state).backward(dy)
        silent = [op[0] == idle and op != ("dgrad", "weight") for op in OPERANDS]
        assert silent == (state.step < 0).tolist()


def test_the_recorded_amax_is_of_the_transformed_operand():
    """wgrad's, where there is a transform: that is what its scale is for."""
    x, weight, dy = leaves()
    state = history()
    run(x, weight, dy, precision_of("fp8-delayed", "wgrad.hadamard={size: 16}"), state)
    for role, t in (("input", x), ("grad", dy)):
        recorded = state.step[OPERANDS.index(("wgrad", role))]
        assert recorded == hadamard_transform(t.detach().t(), Hadamard(16)).abs().max()
        assert recorded != t.detach().abs().max()


def test_only_tensor_scales_are_delayed():
    """A role in a block format has neither a record nor a use for one."""
    x, weight, dy = leaves()
    state = history()
    how = precision_of("fp8-delayed", "input={format: mxfp8-e4m3}")
    run(x, weight, dy, how, state)
    recorded = [op[1] for op, amax in zip(OPERANDS, state.step, strict=True) if amax >= 0]
    assert recorded == ["weight", "grad", "grad"]


def test_nvfp4_can_be_delayed():
    """Its tensor scale is amax / (448 * 6) of the history then."""
    x, weight, dy = leaves()
    state = history(1)
    how = precision_of("nvfp4", "amax_history={length: 1, just_in_time: 1}")
    state.advance(torch.full((len(OPERANDS),), 7.0))
    scales = []

    class Engine(ReferenceEngine):
        def gemm(self, lhs, rhs, *rest):
            scales.extend((lhs.tensor_scale.item(), rhs.tensor_scale.item()))
            return super().gemm(lhs, rhs, *rest)

    y = lowbit_linear(x, weight, LinearContext(how, Engine("tests"), 1, amax_history=state))
    y.backward(dy)
    assert scales == pytest.approx([7.0 / (448 * 6)] * 6, rel=1e-6)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
def test_square_blocks_that_two_gemms_share_are_delayed_on_a_gpu_too(recipe):
    """Their one quantization records one amax."""
    _, weight, _ = leaves()
    how = precision_of(recipe, "amax_history={length: 1, just_in_time: 1}")
    engines, made, steps = (ReferenceEngine("tests"), FusedEngine((9, 0))), [], []
    for engine in engines:
        state = history(1)
        context = LinearContext(how, engine, 1, amax_history=state)
        made.append(context.quantize(weight.detach(), Role.WEIGHT, Gemm.FPROP, Gemm.DGRAD))
        steps.append(state.step)
    assert torch.equal(*steps) and (steps[0] >= 0).any()
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.dequantize(), other.dequantize())


def test_without_a_history():
    x, weight, _ = leaves()
    with pytest.raises(ValueError, match="amax_history"):
        forward(x, weight, HYBRID, None)
