"""The benchmark of cross-entropy: its contenders compute the same, and its bounds."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import loss
from benchmarks.timing import Ceilings, device

LIMITS = Ceilings(1e9, {}, {})
SIZE = loss.Size(8, 96)


@pytest.fixture(autouse=True)
def no_process_group_after():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_contenders_have_the_same_losses_and_gradients():
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 1, 96, generator=draws).bfloat16().to(device())
    labels = torch.randint(96, (8, 1), generator=draws).to(device())
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none")
    expected.sum().backward()
    for name in loss.BYTES:
        own = logits.clone().requires_grad_()
        losses = loss.cross_entropy_of(name)(own, labels)
        losses.sum().backward()
        torch.testing.assert_close(losses.double().flatten(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(own.grad.double(), exact.grad, rtol=2.0**-8, atol=1e-6)


def test_rows_and_bounds():
    """Bytes of all logits at the rate of a copy, and of both phases' time."""
    rows = {row["contender"]: row for row in loss.run(SIZE, list(loss.BYTES), LIMITS, 1e-6)}
    assert {name: row["bytes_a_logit"] for name, row in rows.items()} == {
        "unfused": 52, "native": 28, "liger": 22, "lowbit": 6
    }  # fmt: skip
    for row in rows.values():
        moved = row["bytes_a_logit"] * 8 * 96
        assert row["bound_ms"] == pytest.approx(1e3 * moved / 1e9, abs=1e-4)
        assert row["tb_per_s"] == pytest.approx(moved / row["both"]["median_ms"] / 1e9, abs=1e-4)
