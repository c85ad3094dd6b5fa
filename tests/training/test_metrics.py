"""The metric logger: valid JSON whatever the numbers, resumable, and silent where disabled."""

import io
import json
import math
import sys

import pytest
import torch

from megatron_lowbit.training.metrics import MetricLogger

VALUES = {
    "lm_loss": 2.5,
    "grad_norm": 1.25,
    "learning_rate": 3e-4,
    "tokens_per_second": 12345.6,
    "consumed_tokens": 4096,
    "model_tflops_per_second": 0.01234,
    "memory_gib": 1.5,
    "forward_backward_seconds": 0.2,
}


def logger(save_dir, start=0, enabled=True, tensorboard_dir=None):
    return MetricLogger(save_dir, tensorboard_dir, 10, start, enabled)


def records(save_dir):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (save_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_each_iteration_is_one_object_at_once(tmp_path):
    with logger(tmp_path / "save") as metrics:
        metrics.log(1, **{**VALUES, "lm_loss": torch.tensor(2.5)})
        assert records(tmp_path / "save") == [{"iteration": 1, **VALUES}]
        metrics.log_validation(1, 2.75, 0.5)
        metrics.log_save(1, 0.25)
    validation = {"iteration": 1, "validation_loss": 2.75, "evaluation_seconds": 0.5}
    assert records(tmp_path / "save")[1:] == [validation, {"iteration": 1, "save_seconds": 0.25}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_non_finite_numbers_become_null(tmp_path, value):
    with logger(tmp_path, tensorboard_dir=tmp_path / "tb") as metrics:
        metrics.log(1, **{**VALUES, "lm_loss": value, "grad_norm": value})
        metrics.log_validation(1, value, 0.5)
    assert records(tmp_path)[0]["lm_loss"] is None
    assert records(tmp_path)[0]["learning_rate"] == 3e-4
    assert records(tmp_path)[1]["validation_loss"] is None


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    with logger(tmp_path) as metrics:
        for iteration in range(1, 6):
            metrics.log(iteration, lm_loss=float(iteration))
            metrics.log_validation(iteration, float(iteration), 0.5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "lm_lo')  # a crash in the middle of a line
    with logger(tmp_path, start=3) as metrics:
        metrics.log(4, lm_loss=40.0)
    assert [record["iteration"] for record in records(tmp_path)] == [1, 1, 2, 2, 3, 3, 4]
    assert records(tmp_path)[-1]["lm_loss"] == 40.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_plain_lines_where_stdout_is_no_terminal(tmp_path, capsys):
    with logger(None) as metrics:
        metrics.message("starting [/] now")
        metrics.log(5, **VALUES)
        metrics.log_validation(5, 2.75, 0.5)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "starting [/] now"
    line = "iteration 5/10 | loss 2.5000 | grad norm 1.250 | lr 3.000e-04 | 12,346 tokens/s | "
    assert second == line + "0.0123 TFLOP/s | 1.50 GiB | 0:00:00 left"
    assert third == "iteration 5/10 | validation loss 2.7500"


def test_a_live_line_on_a_terminal(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = sys.stdout
    with logger(None) as metrics:
        metrics.log(1, **VALUES)
        metrics.message("a message with [brackets]")
        metrics.log(2, **VALUES)
    text = terminal.getvalue()
    assert "iteration 1/10 | loss 2.5000" in text
    assert "a message with [brackets]" in text
    assert text.index("a message") < text.index("iteration 2/10")
    assert "\x1b[?25l" in text and text.rstrip().endswith("\x1b[?25h")  # cursor hidden, then shown


def test_a_disabled_logger_does_nothing(tmp_path, capsys):
    with logger(tmp_path / "save", enabled=False, tensorboard_dir=tmp_path / "tb") as metrics:
        metrics.log(1, **VALUES)
        metrics.log_validation(1, 1.0, 0.5)
        metrics.message("hello")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with logger(None, tensorboard_dir=tmp_path) as metrics:
        metrics.log(3, **VALUES)
        metrics.log_validation(3, 2.75, 0.5)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm_loss")] == [(3, 2.5)]
    assert events.Scalars("validation_loss")[0].value == 2.75


def test_an_error_closes_the_files(tmp_path):
    with pytest.raises(RuntimeError), logger(tmp_path) as metrics:
        metrics.log(1, lm_loss=1.0)
        raise RuntimeError
    metrics.close()
    metrics.log(2, lm_loss=1.0)
    assert len(records(tmp_path)) == 1
