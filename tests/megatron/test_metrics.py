"""Lines of metrics.jsonl: valid JSON for all numbers, and resumption."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.run import metrics
from megatron_lowbit.megatron.run.metrics import MetricsWriter

# isort: split
from megatron.training import global_vars

SEQ_LENGTH, BATCH = 64, 8
TOKENS = SEQ_LENGTH * BATCH


class Board:
    """Substitute of TensorBoard's writer that records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name: str):
        return lambda *args, **settings: self.calls.append((name, *args, settings))


class Clock:
    """Clock with settable seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def writer(folder: Path, board: Board | None = None, interval: int = 1, start: int = 0):
    """Build a writer in the state at the beginning of training."""
    made = MetricsWriter(folder, board, interval, SEQ_LENGTH)
    made.add_text("args", "text", global_step=start)
    return made


def train(
    writer: MetricsWriter, iteration: int, loss: float = 2.5, samples: int | None = None
) -> None:
    """Write an iteration's scalars as Megatron-LM does."""
    samples = BATCH * iteration if samples is None else samples
    writer.add_scalar("learning-rate", 3e-4, iteration)
    writer.add_scalar("learning-rate vs samples", 3e-4, samples)
    writer.add_scalar("lm loss", torch.tensor([loss]), iteration)
    writer.add_scalar("lm loss vs samples", torch.tensor([loss]), samples)
    writer.add_scalar("grad-norm", 1.25, iteration)


def records(folder: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_each_iteration_is_one_line(tmp_path):
    made = writer(tmp_path / "save")
    train(made, 1)
    made.add_scalar("batch-size", 8, 1)
    made.add_scalar("lm loss validation", 2.75, 1)
    made.add_scalar("throughput", 12.5, 1)
    made.add_scalar("some new figure", 1, 1)
    train(made, 2)
    # Written as soon as the next one begins.
    (first,) = records(tmp_path / "save")
    assert first == {
        "iteration": 1, "learning_rate": 3e-4, "lm_loss": 2.5, "grad_norm": 1.25, "batch-size": 8,
        "validation_loss": 2.75, "model_tflops_per_second": 12.5, "some_new_figure": 1,
        "consumed_tokens": TOKENS,
    }  # fmt: skip
    made.close()
    made.close()
    assert [record["iteration"] for record in records(tmp_path / "save")] == [1, 2]


def test_tokens_of_a_batch_size_that_changes(tmp_path, clock):
    made = writer(tmp_path, interval=2)
    for iteration, samples in enumerate((2, 4, 8, 16), 1):
        train(made, iteration, samples=samples)
        clock.now += 2
    made.close()
    found = records(tmp_path)
    assert [line["consumed_tokens"] for line in found] == [SEQ_LENGTH * n for n in (2, 4, 8, 16)]
    assert found[1]["tokens_per_second"] == SEQ_LENGTH * 2 / 2
    assert found[3]["tokens_per_second"] == SEQ_LENGTH * 12 / 4


def test_lines_are_written_at_log_intervals(tmp_path):
    """Reading a scalar waits for the GPU."""
    made = writer(tmp_path, interval=4)
    for iteration in range(1, 5):
        train(made, iteration)
        assert not (tmp_path / "metrics.jsonl").exists()
    train(made, 5)
    assert [record["iteration"] for record in records(tmp_path)] == [1, 2, 3, 4]
    made.close()
    assert [record["iteration"] for record in records(tmp_path)] == [1, 2, 3, 4, 5]


def test_the_first_value_of_a_name_stays(tmp_path):
    """Megatron-LM logs the test loss under the validation's name at the last iteration."""
    made = writer(tmp_path)
    train(made, 1)
    made.add_scalar("lm loss validation", 2.75, 1)
    made.add_scalar("lm loss validation", 3.5, 1)
    made.close()
    assert records(tmp_path)[0]["validation_loss"] == 2.75


def test_what_is_flushed_is_in_the_file(tmp_path, clock):
    """Values of the same iteration may follow a flush, as from an evaluation after a save."""
    made = writer(tmp_path, interval=4)
    for iteration in (1, 2):
        train(made, iteration)
        clock.now += 4
    made.flush()
    flushed = records(tmp_path)
    assert [record["iteration"] for record in flushed] == [1, 2]
    assert flushed[1]["tokens_per_second"] == TOKENS / 4
    loss = torch.tensor([2.25])
    made.add_scalar("own", loss, 2)
    made.flush()
    flushed[1]["own"] = 2.25
    loss.zero_()  # as Megatron-LM does with its sums
    made.flush()
    assert records(tmp_path) == flushed
    made.add_scalar("lm loss validation", 2.75, 2)
    made.add_scalar("lm loss validation", 3.5, 2)
    made.flush()
    assert records(tmp_path) == [flushed[0], flushed[1] | {"validation_loss": 2.75}]
    train(made, 3)
    made.add_scalar("lm loss validation", 2.5, 4)
    made.close()
    assert [record["iteration"] for record in records(tmp_path)] == [1, 2, 3, 4]
    assert records(tmp_path)[1] == flushed[1] | {"validation_loss": 2.75}


def test_evaluation_before_training_is_a_line_of_its_own(tmp_path):
    made = writer(tmp_path)
    made.add_scalar("lm loss validation", 2.75, 0)
    train(made, 1)
    made.close()
    assert records(tmp_path)[0] == {"iteration": 0, "validation_loss": 2.75}
    assert records(tmp_path)[1]["lm_loss"] == 2.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_non_finite_numbers_become_null(tmp_path, value):
    made = writer(tmp_path)
    train(made, 1, loss=float(value))
    made.add_scalar("lm loss validation", value, 1)
    made.close()
    (record,) = records(tmp_path)
    assert record["lm_loss"] is record["validation_loss"] is None
    assert record["learning_rate"] == 3e-4


def test_tokens_per_second_is_the_mean_since_the_last_write(tmp_path, clock):
    made = writer(tmp_path, interval=2, start=10)
    clock.now += 90  # the first iteration compiles kernels
    for iteration in range(11, 16):
        clock.now += 4
        train(made, iteration)
        clock.now += 1
    clock.now += 1000  # the last evaluation and checkpoint
    made.close()
    speeds = {record["iteration"]: record.get("tokens_per_second") for record in records(tmp_path)}
    expected = {12: TOKENS / 5, 14: 2 * TOKENS / 10, 15: TOKENS / 5}
    assert {step: speed for step, speed in speeds.items() if speed is not None} == expected
    assert records(tmp_path)[0]["consumed_tokens"] == 11 * TOKENS


def write_lines(folder: Path, iterations: range) -> None:
    made = writer(folder)
    for iteration in iterations:
        train(made, iteration, loss=float(iteration))
    made.close()


def test_a_resumed_run_drops_lines_after_its_start(tmp_path):
    write_lines(tmp_path, range(1, 6))
    made = writer(tmp_path, start=3)
    assert [record["iteration"] for record in records(tmp_path)] == [1, 2, 3]
    train(made, 4, loss=40.0)
    made.close()
    assert [record["lm_loss"] for record in records(tmp_path)] == [1.0, 2.0, 3.0, 40.0]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("rest", "start", "remaining"),
    [
        ('{"iteration": 2, "lm_lo', 5, [1, 2]),
        ('{"iteration": 2, "lm_loss": 2.5}', 5, [1, 2]),
        ('[]\n{}\n1\nx\n{"iteration": null}\n', 5, [1, 2]),
        ("", 0, []),
    ],
    ids=["cut short", "without an end", "no metrics", "a new run"],
)
def test_lines_that_a_run_drops_as_it_begins(tmp_path, rest, start, remaining):
    write_lines(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(rest)
    made = writer(tmp_path, start=start)
    made.add_text("more", "text", global_step=0)  # only the first text names the start
    train(made, 6)
    made.close()
    assert [record["iteration"] for record in records(tmp_path)] == [*remaining, 6]


def test_tensorboard_gets_everything(tmp_path):
    board = Board()
    made = writer(tmp_path, board, start=7)
    made.add_scalar("grad-norm vs samples", 2.5, 64, walltime=1.0)
    made.add_scalar("lm loss validation", 1.0, 8)
    made.add_scalar("lm loss validation", 2.0, 8)
    made.add_histogram("weights", 3, bins=2)
    made.flush()
    made.close()
    assert board.calls == [
        ("add_text", "args", "text", 7, {}),
        ("add_scalar", "grad-norm vs samples", 2.5, 64, {"walltime": 1.0}),
        ("add_scalar", "lm loss validation", 1.0, 8, {}),
        ("add_scalar", "lm loss validation", 2.0, 8, {}),
        ("add_histogram", "weights", 3, {"bins": 2}),
        ("flush", {}),
        ("close", {}),
    ]


def test_without_tensorboard_its_other_methods_do_nothing(tmp_path):
    made = writer(tmp_path)
    assert made.add_histogram("weights", 3, bins=2) is made.flush() is None
    made.close()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_real_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    made = writer(tmp_path, SummaryWriter(str(tmp_path / "board")))
    train(made, 3)
    made.close()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(3, 2.5)]
    assert [event.step for event in events.Scalars("lm loss vs samples")] == [24]


@pytest.mark.parametrize("place", ["metrics.jsonl", "loss.png"])
def test_a_disk_that_fills_at_the_end_does_not_fail_a_finished_run(
    tmp_path, monkeypatch, capsys, place
):
    """Its checkpoints are complete, and its launcher must not start it again."""
    args = Namespace(save=str(tmp_path), rank=0, world_size=1, global_batch_size=1, seq_length=1,
                     log_interval=9, precision_recipe=["nvfp4"])  # fmt: skip

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pretrain, "_draw_loss", full)
    if place == "metrics.jsonl":
        monkeypatch.setattr(MetricsWriter, "close", full)
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    with pretrain.log_metrics(args):
        global_vars.get_tensorboard_writer().add_text("args", "")
    message = f"{tmp_path}: metrics or loss.png are not whole: No space left on device\n"
    assert capsys.readouterr().out == message
    with pytest.raises(ZeroDivisionError), pretrain.log_metrics(args):
        raise ZeroDivisionError
