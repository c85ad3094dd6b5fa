"""--async-save: training goes on, and what is written is what training was at the save."""

import errno
import json
import os
import threading

import pytest
from tiny_run import arguments_for, losses, refused, saved_histories

from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_tensors
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.checkpoint import DOCUMENT, TRACKER
from megatron_lowbit.training.pretrain import pretrain

DELAYED = ("--fp8-recipe", "fp8-delayed", "--train-iters", "6", "--save-interval", "2")
ASYNC = (*DELAYED, "--async-save")


def train(corpus, save, *arguments, after_backward=None):
    given = ("--save", str(save), "--load", str(save), *arguments)
    pretrain(parse_arguments(arguments_for(corpus, given)), after_backward)


def shards(save, iteration: int) -> dict[str, str]:
    """Checksum by file of what a checkpoint holds."""
    document = json.loads((save / f"iter_{iteration:07d}" / DOCUMENT).read_text())
    return {name: file["blake2b"] for name, file in document["files"].items() if name[0] != "."}


@pytest.fixture
def held_back(monkeypatch):
    """Writes a checkpoint's tensors only once ``go`` is set; notes the thread that does."""
    go, writers = threading.Event(), []
    original = checkpoint_tensors.write

    def write(*arguments):
        assert go.wait(60)
        writers.append(threading.current_thread())
        original(*arguments)

    monkeypatch.setattr(checkpoint_tensors, "write", write)
    return go, writers


def test_training_goes_on_and_does_not_change_what_is_written(corpus, tmp_path, held_back):
    """The first checkpoint, of iteration 2, is written after the fourth backward pass."""
    go, writers = held_back
    go.set()
    train(corpus, tmp_path / "sync", *DELAYED)
    assert set(writers) == {threading.main_thread()}
    go.clear()
    writers.clear()

    def release(iteration: int, _) -> None:
        if iteration == 3:
            assert not (tmp_path / "async" / TRACKER).exists()
            go.set()

    train(corpus, tmp_path / "async", *ASYNC, after_backward=release)
    assert len(writers) == 3 and threading.main_thread() not in writers
    for iteration in (2, 4, 6):
        written = shards(tmp_path / "async", iteration)
        assert written == shards(tmp_path / "sync", iteration)
        assert {"common.pt", "__0_0.distcp"} <= written.keys()
    assert shards(tmp_path / "async", 2) != shards(tmp_path / "async", 4)
    assert saved_histories(tmp_path / "async" / "iter_0000002")
    assert losses(tmp_path / "async") == losses(tmp_path / "sync")


@pytest.mark.parametrize("failing", [2, 6])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(corpus, tmp_path, monkeypatch, failing):
    """Also the last one, behind which no iteration follows."""
    original = checkpoint_tensors.write

    def write(directory, *rest):
        original(directory, *rest)
        if directory.name == f".iter_{failing:07d}.partial":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_tensors, "write", write)
    with pytest.raises(UserError, match=f"cannot write the checkpoint to {tmp_path}: No space"):
        train(corpus, tmp_path, *ASYNC)
    assert max(losses(tmp_path)) <= failing + 2
    kept = [f"iter_{iteration:07d}" for iteration in range(2, failing, 2)]
    assert sorted(path.name for path in tmp_path.iterdir() if "iter" in path.name) == sorted(
        [*kept, *([TRACKER] if kept else [])]
    )


def test_other_errors_leave_the_pending_checkpoint_whole(corpus, tmp_path, held_back):
    go, _ = held_back

    def fail(iteration: int, _) -> None:
        if iteration == 2:
            threading.Timer(0.5, go.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(corpus, tmp_path, *ASYNC, after_backward=fail)
    assert (tmp_path / TRACKER).read_text().strip() == "2"
    train(corpus, tmp_path, *ASYNC)
    assert min(losses(tmp_path)) <= 3 and max(losses(tmp_path)) == 6


def test_needs_a_place(pretrain_here):
    assert "--async-save needs --save" in refused(pretrain_here("--train-iters", 1, "--async-save"))
