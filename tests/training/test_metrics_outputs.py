"""Where metrics and messages go beside the console: each rank's log file, Weights & Biases."""

import json
import logging
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.distributed import print_rank0
from megatron_lowbit.training.metrics import MetricLogger
from megatron_lowbit.training.run_log import RUN_LOG, rank_log_file
from megatron_lowbit.training.weights_and_biases import start_wandb

REQUIRED = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --data-path unread "
    "--micro-batch-size 1 --train-iters 10 --lr 1 "
)


def arguments(text=""):
    return parse_arguments((REQUIRED + text).split())


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_logs_and_the_first_prints(tmp_path, capsys, monkeypatch, rank):
    monkeypatch.setattr("megatron_lowbit.training.distributed.rank", lambda: rank)
    logger = MetricLogger(tmp_path / "save", None, 10, 0, rank == 0)
    with rank_log_file(str(tmp_path / "logs"), rank), logger as metrics:
        print_rank0("loaded", 3)
        metrics.log(1, lm_loss=2.5, forward_backward_seconds=0.5)
        metrics.log_validation(1, 2.75, 0.5)
        metrics.message("a message")
    print_rank0("after the end")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == [f"rank_0000{rank}.log"]
    log = (tmp_path / "logs" / f"rank_0000{rank}.log").read_text().splitlines()
    said = [line.split(" INFO ")[1] for line in log]
    assert said[0] == "loaded 3"
    assert said[1].startswith("iteration 1/10 | loss 2.5000 | ")
    assert said[2:] == ["iteration 1/10 | validation loss 2.7500", "a message"]
    printed = [*said, "after the end"] if rank == 0 else []
    assert capsys.readouterr().out.splitlines() == printed
    assert (tmp_path / "save").exists() == (rank == 0)


def test_warnings_and_the_last_error_are_logged(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as outside pytest
    with (
        warnings.catch_warnings(),
        pytest.raises(UserError),
        rank_log_file(str(tmp_path), 12),
    ):
        warnings.simplefilter("always")
        warnings.warn("old function", DeprecationWarning, stacklevel=1)
        logging.getLogger("another.library").warning("looks odd")
        raise UserError("--save X: full")
    text = (tmp_path / "rank_00012.log").read_text()
    assert "WARNING" in text and "old function" in text and "WARNING looks odd" in text
    assert "ERROR ended by UserError" in text and text.endswith("UserError: --save X: full\n")
    error = capsys.readouterr().err
    assert "old function" in error and "looks odd" in error and "full" not in error
    assert logging.getLogger().handlers == []
    assert not RUN_LOG.isEnabledFor(logging.INFO)


def test_a_second_run_appends(tmp_path):
    for text in ("one", "two"):
        with rank_log_file(str(tmp_path), 0):
            RUN_LOG.info(text)
    lines = (tmp_path / "rank_00000.log").read_text().splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["one", "two"]


def test_a_log_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"--log-file-dir: .*file"),
        rank_log_file(str(tmp_path / "file"), 0),
    ):
        pass


@pytest.fixture
def wandb(monkeypatch):
    """A module in wandb's place, which records what it is given."""
    module = ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})
    module.calls = []
    run = SimpleNamespace(
        log=lambda numbers, step: module.calls.append((step, numbers)),
        finish=lambda exit_code: module.calls.append(("finish", exit_code)),
    )

    def init(**settings):
        module.settings = settings
        return run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_what_the_metrics_file_gets(tmp_path, wandb):
    args = arguments(f"--wandb-project P --wandb-exp-name E --save {tmp_path}")
    with MetricLogger(tmp_path, None, 10, 0, True, start_wandb(args)) as metrics:
        metrics.log(1, lm_loss=2.5, learning_rate=0.1)
        metrics.log_validation(1, 2.75, 0.5)
        metrics.log_save(2, 0.25)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert wandb.calls == [*((line.pop("iteration"), line) for line in lines), ("finish", 0)]
    assert wandb.settings["project"] == "P" and wandb.settings["name"] == "E"
    assert wandb.settings["dir"] == str(tmp_path / "wandb") and (tmp_path / "wandb").is_dir()
    assert wandb.settings["config"]["train_iters"] == 10


def test_wandb_learns_of_a_failure(wandb, tmp_path):
    args = arguments(f"--wandb-project P --wandb-save-dir {tmp_path / 'there'}")
    with pytest.raises(RuntimeError), MetricLogger(None, None, 10, 0, True, start_wandb(args)):
        raise RuntimeError
    assert wandb.calls == [("finish", 1)]
    assert wandb.settings["dir"] == str(tmp_path / "there")


def test_without_a_project_wandb_is_not_asked(wandb):
    assert start_wandb(arguments()) is None
    assert not hasattr(wandb, "settings")


def test_a_refused_run_is_a_user_error(wandb):
    def init(**settings):
        raise wandb.Error("no API key")

    wandb.init = init
    with pytest.raises(UserError, match="--wandb-project P: no API key"):
        start_wandb(arguments("--wandb-project P"))


@pytest.mark.parametrize("module", [None, ModuleType("wandb")], ids=["absent", "a folder ./wandb"])
def test_wandb_not_installed(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(UserError, match=r"--wandb-project .*not installed"):
        arguments("--wandb-project P")


@pytest.mark.parametrize("option", ["--wandb-exp-name", "--wandb-save-dir"])
def test_a_project_is_needed(option):
    with pytest.raises(UserError, match=f"{option} needs --wandb-project"):
        arguments(f"{option} X")
