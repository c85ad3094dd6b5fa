"""Verification and records of checkpoints in a run."""

import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.training import global_vars, training

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run.checkpoint_guard import CheckpointGuard
from megatron_lowbit.megatron.run.metrics import MetricsWriter
from megatron_lowbit.storage import files
from tests.megatron.saved_checkpoints import SHARD, arguments, hidden, is_recorded

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture
def upstream_saves(monkeypatch) -> list:
    """Recorded calls of Megatron-LM's own function."""
    calls: list = []
    monkeypatch.setattr(training, "save_checkpoint", lambda *args, **_: calls.append(args))
    return calls


def chunk_with_steps() -> torch.nn.Module:
    """Return a model whose steps are not counted."""
    chunk = torch.nn.Linear(1, 1)
    chunk.lowbit_steps = SimpleNamespace(listeners=[])
    return chunk


def test_the_guard_verifies_then_records(saved, write_checkpoint, upstream_saves):
    chunks = [chunk_with_steps()]
    upstream = training.save_checkpoint
    guard = CheckpointGuard(arguments(saved, save=str(saved)))
    assert guard(chunks) is chunks
    (listener,) = chunks[0].lowbit_steps.listeners
    listener(3, True)
    path = saved / "iter_0000004"
    training.save_checkpoint(4, "model")
    files.write_tracker(saved, 4)
    write_checkpoint(path)
    training.save_checkpoint(2, "model")
    assert hidden(saved) == [".iter_0000002.replaced"]
    guard.close()
    assert is_recorded(path)
    assert upstream_saves == [(4, "model"), (2, "model")]
    assert training.save_checkpoint is upstream


@pytest.mark.parametrize(("batch", "schedule", "last"), [
    (2, None, 12), (4, None, 9), (1, None, 18), (30, None, 6), (4, "0:2 12:4", 7)
])  # fmt: skip
def test_a_resumed_run_trains_the_samples_that_are_left(saved, monkeypatch, batch, schedule, last):
    """Iteration 6 was saved after 12 of 24 samples, with another batch size."""
    monkeypatch.setattr(training, "load_checkpoint", lambda: (6, 0))
    args = arguments(saved, finetune=False, train_samples=24, consumed_train_samples=12,
                     global_batch_size=batch, step_batch_size_schedule=schedule, profile=False,
                     profile_step_start=0, use_pytorch_profiler=False)  # fmt: skip
    args.train_iters = 7 if schedule else 24 // batch
    with closing(CheckpointGuard(args)) as guard:
        assert guard._load() == (6, 0)
    assert args.train_iters == last


def test_what_a_run_has_logged_is_written_before_a_save(saved, monkeypatch):
    """After a resumption, the file has every iteration once."""
    writer = MetricsWriter(saved, None, log_interval=4, seq_length=1)
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)
    found: list = []
    metrics = saved / "metrics.jsonl"
    monkeypatch.setattr(training, "save_checkpoint", lambda *_: found.append(metrics.read_text()))
    guard = CheckpointGuard(arguments(None, save=str(saved)))
    guard([chunk_with_steps()])
    for iteration in (1, 2, 3):
        writer.add_scalar("lm loss", 2.5, iteration)
        if iteration > 1:
            training.save_checkpoint(iteration)
    guard.close()
    assert [len(text.splitlines()) for text in found] == [2, 3]
    assert found[1].startswith(found[0]) and metrics.read_text() == found[1]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_checkpoints_that_do_not_stay_are_replaced_alike(
    saved, write_checkpoint, tmp_path, upstream_saves, elsewhere
):
    folder = tmp_path / "scratch" if elsewhere else saved / "non_persistent"
    path = write_checkpoint(folder / "iter_0000003")
    args = arguments(saved, save=str(saved), non_persistent_ckpt_type="global")
    args.non_persistent_global_ckpt_dir = str(folder) if elsewhere else None
    for finished in (False, True):
        guard = CheckpointGuard(args)
        guard([chunk_with_steps()])
        training.save_checkpoint(3, non_persistent_ckpt=True)
        if finished:
            write_checkpoint(path)
        guard.close()
        assert hidden(folder) == ([] if finished else [".iter_0000003.replaced"])
    assert is_recorded(saved / "iter_0000003")
    with closing(CheckpointGuard(args)) as guard:
        guard([chunk_with_steps()])
        args.non_persistent_ckpt_type = "local"
        training.save_checkpoint(3, non_persistent_ckpt=True)
    assert path.exists()


def test_the_guard_refuses_before_the_model_is_touched(saved):
    (saved / "iter_0000003" / SHARD).unlink()
    chunks = [chunk_with_steps()]
    guard = CheckpointGuard(arguments(saved, save=str(saved)))
    with pytest.raises(UserError, match="missing"):
        guard(chunks)
    assert chunks[0].lowbit_steps.listeners == []
    guard.close()


@pytest.mark.parametrize("saves", [False, True])
def test_a_run_that_saves_nothing_and_another_rank_record_nothing(saved, monkeypatch, saves):
    if saves:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    chunks = [chunk_with_steps()]
    guard = CheckpointGuard(arguments(None, save=str(saved) if saves else None))
    guard(chunks)
    assert chunks[0].lowbit_steps.listeners == []
    guard.close()


def take(directory: Path) -> None:
    """Begin a run that saves into a folder, and end it."""
    guard = CheckpointGuard(arguments(None, save=str(directory), non_persistent_ckpt_type="global",
                                      non_persistent_global_ckpt_dir=None))  # fmt: skip
    try:
        guard([chunk_with_steps()])
    finally:
        guard.close()


@pytest.mark.parametrize(
    "name", [files.TRACKER, "metrics.jsonl", "megatron.log", "progress.txt", "non_persistent"]
)
def test_links_that_a_run_would_write_through_are_refused(saved, tmp_path, name):
    (saved / name).unlink(missing_ok=True)
    (saved / name).symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=f"{saved / name}: a link is not written; delete it"):
        take(saved)
    assert not (tmp_path / "victim").exists() and not (saved / ".lock").exists()


@pytest.mark.parametrize("name", [files.TRACKER, "metrics.jsonl", "progress.txt"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_a_run_cannot_write_later_is_refused_at_its_start(saved, name, make):
    (saved / name).unlink(missing_ok=True)
    make(saved / name)
    with pytest.raises(UserError, match=f"{saved / name}: in the way; move it"):
        take(saved)


def test_metrics_of_another_program_are_refused(saved):
    metrics = saved / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.5}\n')
    with pytest.raises(UserError, match=f"{metrics}: line 1 has no iteration"):
        take(saved)
    for own in ('{"iteration": 1}\n', '{"iteration": 1', "", "\0" * 50):
        metrics.write_text(own)
        take(saved)
        assert metrics.read_text() == own


def test_a_start_deletes_what_a_killed_run_did_not_finish(saved):
    for directory in (saved, saved / "non_persistent"):
        (directory / "iter_0000009").mkdir(parents=True)
        (directory / "iter_0000009" / SHARD).write_text("half")
    take(saved)
    assert files.iterations(saved) == [1, 2, 3]
    assert files.iterations(saved / "non_persistent") == []


def test_a_folder_of_another_program_is_not_replaced(saved):
    notes = saved / "iter_0000009" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(
        UserError, match=r"09: has no file of a checkpoint, but notes\.txt; move it"
    ):
        take(saved)
    assert notes.read_text() == "mine"


def test_a_file_with_the_name_of_a_checkpoint_is_not_replaced(saved):
    for folder in (saved, saved / "non_persistent"):
        file = folder / "iter_0000009"
        folder.mkdir(exist_ok=True)
        file.write_text("mine")
        with pytest.raises(UserError, match=rf"{file}: a file with the name of a checkpoint"):
            take(saved)
        assert file.read_text() == "mine"
        file.unlink()


def test_a_link_to_nothing_is_no_folder_of_another_program(saved, tmp_path):
    (saved / "iter_0000009").symlink_to(tmp_path / "gone")
    take(saved)
    assert (saved / "iter_0000009").is_symlink()


NOTHING = {
    "--load": {"load": "empty"},
    "--load, another --save": {"load": "empty", "save": "other"},
    "--load, --finetune": {"load": "empty", "save": "empty", "finetune": True},
    "--load, --skip-train": {"load": "empty", "save": "empty", "skip_train": True},
    "--pretrained-checkpoint": {"pretrained_checkpoint": "empty"},
}


@pytest.mark.parametrize("case", NOTHING)
def test_random_weights_do_not_take_the_place_of_a_missing_checkpoint(
    case, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    given = {"finetune": False, "skip_train": False, "load": None, **NOTHING[case]}
    flag = case.partition(",")[0]
    guard = CheckpointGuard(arguments(**given))
    with closing(guard), pytest.raises(UserError, match=f"^{flag} empty: holds no checkpoint; "):
        guard([chunk_with_steps()])
    started = CheckpointGuard(arguments("empty", save="empty", finetune=False, skip_train=False))
    with closing(started):
        started([chunk_with_steps()])


@pytest.mark.parametrize(
    ("by_torch", "start", "iteration", "argument"),
    [
        (False, 6, 6, None),
        (False, 5, 6, "--profile-step-start 5"),
        (True, 9, 6, "--use-pytorch-profiler"),
        (True, 9, 0, None),
    ],
)
def test_a_resumed_run_says_that_it_is_not_profiled(
    by_torch, start, iteration, argument, saved, monkeypatch, capsys
):
    monkeypatch.setattr(training, "load_checkpoint", lambda *_: (iteration, 0.0))
    args = arguments(saved, profile=True, use_pytorch_profiler=by_torch, profile_step_start=start)
    with closing(CheckpointGuard(args)) as guard:
        guard([chunk_with_steps()])
        assert training.load_checkpoint(None) == (iteration, 0.0)
    line = f"{argument}: without effect, the run continues after iteration 6\n"
    assert capsys.readouterr().out == (line if argument else "")
    assert args.profile == (argument is None)
