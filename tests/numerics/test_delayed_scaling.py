"""Delayed scaling against a plain Python derivation."""

import math
import random

import pytest
import torch

from megatron_lowbit.numerics import FORMATS, AmaxHistory, DelayedAmax, DelayedScaling, Quantizer

CPU = torch.device("cpu")


def amax_of(scaling: DelayedScaling, entries: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Return the amax for a scale from finished steps (length,) and the tensor's own."""
    return DelayedAmax(scaling.earlier(entries), None).resolve(current)


def record(history: AmaxHistory, operand: int, amax: float) -> None:
    """Take a tensor's amax, as of any rule."""
    history.amax(operand, DelayedScaling()).resolve(torch.tensor(amax))


def derived(recorded: list[float], current: float, scaling: DelayedScaling) -> float:
    """Compute the documented rule on a list of the amaxes of finished steps, oldest first."""
    window = recorded[-scaling.length :]
    if len(recorded) < scaling.just_in_time:
        return current
    if scaling.algorithm == "max":
        return max(window)
    weight = 2 / (scaling.length + 1)
    mean = window[0]
    for amax in window[1:]:
        mean = (1 - weight) * mean + weight * amax
    return mean


@pytest.mark.parametrize("algorithm", ["max", "average"])
@pytest.mark.parametrize("length, just_in_time", [(1, 1), (4, 1), (4, 4), (16, 3), (1, 5), (4, 9)])
def test_every_step_of_a_run(algorithm, length, just_in_time):
    """From an empty history to one that has forgotten its first steps."""
    scaling = DelayedScaling(length, algorithm, just_in_time)
    rng = random.Random(length)
    kept = max(length, just_in_time)
    history, recorded = AmaxHistory(1, kept, CPU), []
    for _ in range(3 * kept + 2):
        current = rng.lognormvariate(0, 3)
        result = history.amax(0, scaling).resolve(torch.tensor(current))
        assert result.dtype == torch.float32 and result.shape == ()
        expected = derived(recorded, current, scaling)
        # FP32 once per step of the average; the maximum is exact.
        assert result.item() == pytest.approx(expected, rel=2**-22 * length)
        history.advance(history.step)
        recorded.append(current)
    assert history.length == kept == scaling.recorded and (history.entries >= 0).all()


@pytest.mark.parametrize("algorithm", ["max", "average"])
def test_just_in_time_counts_recorded_steps(algorithm):
    """Steps without an amax do not count, and the average skips them wherever they are."""
    scaling = DelayedScaling(4, algorithm, 2)
    current = torch.tensor(5.0)
    assert amax_of(scaling, torch.tensor([-1.0, -1.0, -1.0, 3.0]), current) == 5.0
    assert amax_of(scaling, torch.tensor([-1.0, -1.0, -1.0, -1.0]), current) == 5.0
    for entries in ([-1.0, 2.0, -1.0, 3.0], [2.0, 3.0, -1.0, -1.0], [2.0, -1.0, -1.0, 3.0]):
        expected = derived([2.0, 3.0], 5.0, scaling)
        assert amax_of(scaling, torch.tensor(entries), current).item() == pytest.approx(expected)


def test_a_longer_history_than_counts():
    """Only the newest ``length`` entries count, also for just_in_time."""
    entries = torch.tensor([100.0, 100.0, 2.0, -1.0])
    assert amax_of(DelayedScaling(2, "max", 1), entries, torch.tensor(7.0)) == 2.0
    assert amax_of(DelayedScaling(2, "max", 2), entries, torch.tensor(7.0)) == 7.0


def test_zero_is_an_amax():
    scaling = DelayedScaling(2, "average", 2)
    assert amax_of(scaling, torch.tensor([0.0, 0.0]), torch.tensor(7.0)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_leave_no_trace(value):
    history = AmaxHistory(2, 3, CPU)
    for amax in (2.0, value, 1.0):
        record(history, 0, amax)
    record(history, 1, value)
    assert history.step.tolist() == [2.0, -1.0]
    history.advance(history.step)
    assert history.entries.tolist() == [[-1.0, -1.0, 2.0], [-1.0, -1.0, -1.0]]
    current = torch.tensor(4.0)
    assert amax_of(DelayedScaling(3, "max", 1), history.entries[1], current) == 4.0


@pytest.mark.parametrize("algorithm", ["max", "average"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_amax_that_is_not_finite_is_not_delayed(algorithm, value):
    """A finite scale would make ordinary numbers of infinities."""
    entries, current = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(value)
    amax = amax_of(DelayedScaling(3, algorithm, 1), entries, current)
    assert not amax.isfinite()
    x = torch.tensor([[1.0, 2.0, value]])
    q = Quantizer(FORMATS["fp8-tensor-e4m3"])(x, amax)
    assert q.dequantize().isnan().all()


def test_microbatches_in_any_order_and_twice():
    """The scale is from finished steps, the step's own is a maximum: neither sees an order."""
    amaxes = [0.5, 3.0, 2.0, 3.5, 0.1]
    scaling = DelayedScaling(3, "average", 1)

    def run(order):
        history, used = AmaxHistory(1, 3, CPU), []
        for step in range(4):
            for i in order:
                amax = torch.tensor(amaxes[i] * (step + 1))
                used.append((step, i, history.amax(0, scaling).resolve(amax).item()))
            history.advance(history.step)
        return sorted(set(used)), history.entries.tolist()

    expected = run([0, 1, 2, 3, 4])
    assert run([4, 2, 0, 3, 1]) == expected
    assert run([1, 1, 0, 3, 2, 4, 3]) == expected
    assert expected[1] == [[7.0, 10.5, 14.0]]


def test_advance_takes_the_reduced_amaxes_and_starts_anew():
    history = AmaxHistory(2, 2, CPU)
    record(history, 0, 1.0)
    history.advance(torch.tensor([4.0, 5.0]))  # the maximum over shards
    assert history.entries[:, -1].tolist() == [4.0, 5.0]
    assert history.step.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("format", ["fp8-tensor-e4m3", "fp8-tensor-e5m2"])
def test_saturation_beyond_the_delayed_scale(format):
    """A tensor that outgrew its history saturates at the history's amax; a smaller one does not."""
    scaling, history = DelayedScaling(4, "max", 1), AmaxHistory(1, 4, CPU)
    for amax in (1.0, 2.0):
        record(history, 0, amax)
        history.advance(history.step)
    quantizer = Quantizer(FORMATS[format])

    def delayed(x):
        return quantizer(x, history.amax(0, scaling, record=False))

    x = torch.tensor([[0.5, -1.0, 7.0, -300.0]])
    q = delayed(x)
    assert q.tensor_scale == 2 / FORMATS[format].element.max
    assert q.dequantize().tolist() == [[0.5, -1.0, 2.0, -2.0]]
    assert quantizer(x).dequantize()[0, 3] == -300
    small = delayed(torch.tensor([[0.25, -0.125]]))
    assert small.tensor_scale == q.tensor_scale
    assert small.dequantize().tolist() == [[0.25, -0.125]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"length": 0}, "length 0 is not from 1 to 65536"),
        ({"length": -3}, "length -3 is not from 1"),
        ({"algorithm": "mean"}, "'mean' is not max or average"),
        ({"just_in_time": 0}, "just_in_time 0 is not from 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        DelayedScaling(**arguments)


def test_an_evaluation_may_come_first():
    """In inference mode; a later step is recorded as without it."""
    history = AmaxHistory(1, 4, CPU)
    with torch.inference_mode():
        history.amax(0, DelayedScaling(), record=False)
    record(history, 0, 3.0)
    history.advance(history.step.clone())
    assert history.entries[0, -1] == 3.0
