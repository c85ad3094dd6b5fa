"""Checks of losses: when each is looked at, by whom, and that none is left out."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.megatron import forward_step


class OnGPU:
    """A loss in device memory, whose copies are ordered by events."""

    is_cuda = True

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def detach(self) -> "OnGPU":
        return self

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        assert device == "cpu" and non_blocking
        return self.value


class Event:
    """An event of a copy, which is complete once it is waited for."""

    def record(self) -> None:
        self.complete = False

    def synchronize(self) -> None:
        self.complete = True


@pytest.fixture
def checked(monkeypatch):
    """Return what the state machine has validated, by name of the check and value."""
    calls: list[tuple[str, float]] = []

    def validate_result(result, rejects, message, **options):
        calls.append((message, float(result)))
        if bool(rejects(result)):
            raise RuntimeError(message)

    machine = SimpleNamespace(
        validate_result=validate_result, is_unexpectedly_large=lambda loss, **_: loss > 100
    )
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=False)
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    monkeypatch.setattr(forward_step, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(forward_step, "get_num_microbatches", lambda: 3)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return SimpleNamespace(args=args, losses=lambda: [value for _, value in calls[::2]])


def test_a_loss_is_checked_with_the_next_one_and_the_last_at_once(checked):
    checks = forward_step._LossChecks()
    for step in (0.0, 10.0):  # a step begins as the first did
        before = checked.losses()
        for number, expected in ((1.0, []), (2.0, [1.0]), (3.0, [1.0, 2.0, 3.0])):
            checks.add(OnGPU(step + number))
            assert checked.losses() == before + [step + value for value in expected]


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize(("value", "message"), [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_no_step_ends_with_a_loss_that_is_not_finite(checked, bad, value, message):
    checks = forward_step._LossChecks()
    with pytest.raises(RuntimeError, match=f"found {message}"):
        for number in (1, 2, 3):
            checks.add(OnGPU(value if number == bad else 1.0))


def test_losses_of_evaluations_and_of_cpus_are_checked_at_once(checked):
    checks = forward_step._LossChecks()
    with torch.no_grad():
        checks.add(OnGPU(1.0))
        assert checked.losses() == [1.0]
    checks.add(torch.tensor(2.0))
    assert checked.losses() == [1.0, 2.0]


def test_nothing_is_copied_without_a_check(checked):
    checked.args.check_for_nan_in_loss_and_grad = False
    checks = forward_step._LossChecks()
    for _ in range(3):
        checks.add(OnGPU(float("nan")))
    assert checked.losses() == [] and not checks.copies


def test_spikes_are_checked_alone(checked):
    checked.args.check_for_nan_in_loss_and_grad = False
    checked.args.check_for_spiky_loss = True
    with pytest.raises(RuntimeError, match="Spiky loss"):
        forward_step._LossChecks().add(torch.tensor(1000.0))
