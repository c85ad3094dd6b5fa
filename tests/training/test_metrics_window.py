"""What a log interval reports: means, speed and memory; no clock is read in an assertion."""

from argparse import Namespace

import pytest
import torch.distributed as dist

from megatron_lowbit.analysis.spike_score import spike_score
from megatron_lowbit.training import timers, window
from megatron_lowbit.training.flops import sample_flops
from megatron_lowbit.training.timers import PhaseTimer, memory_gib
from megatron_lowbit.training.window import LogWindow

VOCABULARY = 128
ARGS = Namespace(
    hybrid_override_pattern=None,
    log_interval=4, train_iters=10, global_batch_size=8, seq_length=16, num_layers=2,
    hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_channels=8,
    swiglu=False, num_experts=None,
)  # fmt: skip


class Clock:
    """Seconds, as told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Recorder:
    """In the place of a MetricLogger."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}

    def log(self, iteration: int, **values: float) -> None:
        self.logged[iteration] = values


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(window, "time", clock)
    monkeypatch.setattr(timers, "time", clock)
    monkeypatch.setattr(timers.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return clock


def train(clock, losses, folds=lambda: (0, 0)):
    """One iteration a loss, of 3 seconds forward and backward, 1 of the optimizer, 1 of others."""
    recorder = Recorder()
    log = LogWindow(ARGS, recorder, VOCABULARY, folds)
    for iteration, loss in enumerate(losses, start=1):
        with log.timer.phase("forward_backward"):
            clock.now += 3
        with log.timer.phase("optimizer"):
            clock.now += 1
        clock.now += 1
        log.add(iteration, 8 * iteration, loss, grad_norm=loss / 2, learning_rate=1e-3)
        log.pause(lambda: setattr(clock, "now", clock.now + 1000))
    return recorder.logged


def test_means_over_the_interval(clock):
    losses = [5.0, 4.0, 4.0, 3.0, 2.0, 8.0, 2.0, 2.0, 1.0, 2.0]
    logged = train(clock, losses)
    assert list(logged) == [4, 8, 10]  # the last one at the end of the run
    assert [values["lm_loss"] for values in logged.values()] == [4.0, 3.5, 1.5]
    assert [values["grad_norm"] for values in logged.values()] == [1.5, 1.0, 1.0]
    assert [values["consumed_tokens"] for values in logged.values()] == [512, 1024, 1280]
    assert logged[10]["spike_score"] == spike_score(losses)


def test_values_that_did_not_fold(clock):
    counts = iter([(0, 0), (3, 400), (0, 400)])
    logged = train(clock, [1.0] * 10, lambda: next(counts))
    assert [values.get("folded_inexactly") for values in logged.values()] == [None, 3 / 400, 0]


def test_speed_leaves_out_what_paused(clock):
    for values in train(clock, [1.0] * 10).values():
        assert values["tokens_per_second"] == pytest.approx(8 * 16 / 5)
        tflops = 8 / 5 * sample_flops(ARGS, VOCABULARY) / 1e12
        assert values["model_tflops_per_second"] == pytest.approx(tflops / 2)  # of two processes
        assert values["forward_backward_seconds"] == pytest.approx(3)
        assert values["optimizer_seconds"] == pytest.approx(1)


def test_a_phase_that_raises_does_not_count(clock):
    timer = PhaseTimer()
    with pytest.raises(RuntimeError), timer.phase("forward_backward"):
        raise RuntimeError
    assert timer.take() == {}


def test_on_a_gpu_only_reading_waits(monkeypatch):
    """Events of a GPU that this test plays: each next one a quarter of a second later."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")
            self.milliseconds = 250.0 * len(calls)

        def elapsed_time(self, end):
            assert "synchronize" in calls
            return end.milliseconds - self.milliseconds

    monkeypatch.setattr(timers.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timers.torch.cuda, "Event", Event)
    monkeypatch.setattr(timers.torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    timer = PhaseTimer()
    for _ in range(3):
        with timer.phase("optimizer"):
            pass
    assert calls == ["record"] * 6
    assert timer.take() == {"optimizer": 0.25}
    assert calls.count("synchronize") == 1
    assert timer.take() == {}


def test_memory_is_in_gib(monkeypatch):
    monkeypatch.setattr(timers.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timers.torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    assert memory_gib() == 1.5
    monkeypatch.setattr(timers.torch.cuda, "is_available", lambda: False)
    assert 0.01 < memory_gib() < 1000  # this process, with torch in it
