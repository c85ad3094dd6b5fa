"""All that a run reports arrives in the metrics file, in TensorBoard, in wandb and in the logs."""

import sys
from types import ModuleType, SimpleNamespace

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import done, metrics

LOGGED = {
    "iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_tokens", "spike_score",
    "tokens_per_second", "model_tflops_per_second", "memory_gib", "forward_backward_seconds",
    "optimizer_seconds",
}  # fmt: skip


def test_metrics_arrive_everywhere(pretrain_here, tmp_path, monkeypatch):
    received = []
    run = SimpleNamespace(
        log=lambda numbers, step: received.append((step, set(numbers))),
        finish=lambda exit_code: received.append(("finish", exit_code)),
    )
    wandb = ModuleType("wandb")
    wandb.Error, wandb.init = Exception, lambda **settings: run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    save, logs, board = tmp_path / "run", tmp_path / "logs", tmp_path / "board"
    result = pretrain_here(
        "--train-iters", 4, "--log-interval", 2, "--save", save, "--tensorboard-dir", board,
        "--log-file-dir", logs, "--wandb-project", "tests",
    )  # fmt: skip
    done(result)

    expected = [
        (2, LOGGED),
        (4, LOGGED),
        (4, {"iteration", "validation_loss", "evaluation_seconds"}),
        (4, {"iteration", "save_seconds"}),
    ]
    assert [(line["iteration"], set(line)) for line in metrics(save)] == expected
    steps = [(iteration, names - {"iteration"}) for iteration, names in expected]
    assert received == [*steps, ("finish", 0)]
    assert set(EventAccumulator(str(board)).Reload().Tags()["scalars"]) == set.union(
        *(names for _, names in steps)
    )
    log = (logs / "rank_00000.log").read_text()
    said = [line.strip() for line in result.stdout.splitlines()]
    assert said and [line for line in said if line not in log] == []
