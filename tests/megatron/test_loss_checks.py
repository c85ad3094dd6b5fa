"""Checks of losses: when each is looked at, by whom, and that none is omitted."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.megatron import forward_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def checked(monkeypatch):
    """Return the values that the state machine has validated, by name of the check and value."""
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
    return SimpleNamespace(args=args, losses=lambda: [value for _, value in calls[::2]])


def microbatch(value: float) -> torch.Tensor:
    """Return a micro batch's loss as Megatron-LM differentiates it: divided in place."""
    weight = torch.tensor(value, device=DEVICE, requires_grad=True)
    loss = weight * 1.0
    forward_step._check(loss)
    loss /= 4
    return loss


def test_a_loss_is_checked_when_its_own_backward_pass_ends(checked):
    """In a pipeline, forward passes of others come between."""
    losses = [microbatch(value) for value in (1.0, 2.0)]
    assert checked.losses() == []
    losses[1].backward()
    assert checked.losses() == [2.0]
    losses[0].backward()
    assert checked.losses() == [2.0, 1.0]


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_no_step_ends_with_a_loss_that_is_not_finite(checked, value, message):
    loss = microbatch(value)
    with pytest.raises(RuntimeError, match=f"found {message}"):
        loss.backward()


def test_losses_of_evaluations_are_checked_immediately(checked):
    with torch.no_grad():
        microbatch(1.0)
    assert checked.losses() == [1.0]


def test_nothing_is_copied_without_a_check(checked, monkeypatch):
    checked.args.check_for_nan_in_loss_and_grad = False
    monkeypatch.setattr(torch.Tensor, "to", lambda *_, **__: pytest.fail("copied"))
    microbatch(float("nan")).backward()
    assert checked.losses() == []


def test_spikes_are_checked_alone(checked):
    checked.args.check_for_nan_in_loss_and_grad = False
    checked.args.check_for_spiky_loss = True
    loss = microbatch(1000.0)
    with pytest.raises(RuntimeError, match="Spiky loss"):
        loss.backward()
