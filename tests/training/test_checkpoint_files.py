"""Damaged checkpoints are found before training, fallen back from on request; old ones deleted."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from tiny_gpt import SHAPE, Training, initialize_distributed, parallel_args, shutdown

from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_files
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.checkpoint import (
    DOCUMENT,
    TRACKER,
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
    valid_iteration,
)
from megatron_lowbit.training.checkpoint_files import complete_iterations

SHARD = "__0_0.distcp"
FILES = (SHARD, ".metadata", "common.pt", "metadata.json")


@pytest.fixture(scope="module", autouse=True)
def single_process():
    initialize_distributed(parallel_args())
    yield
    shutdown()


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(distributed_optimizer=False)


@pytest.fixture(scope="module")
def original(training, tmp_path_factory) -> Path:
    """Checkpoints of iterations 1, 2 and 3."""
    directory = tmp_path_factory.mktemp("original")
    for iteration in (1, 2, 3):
        training.save(directory, iteration)
    return directory


@pytest.fixture
def saved(original, tmp_path) -> Path:
    """A copy of them, to damage."""
    return shutil.copytree(original, tmp_path / "saved")


def turn_bit(file: Path, position: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    file.write_bytes(content)


def save(training: Training, directory: Path, iteration: int, keep_last: int | None) -> None:
    """The model alone: it is quick."""
    state = {"model": SHAPE}
    save_checkpoint(directory, iteration, training.model, None, None, state, keep_last)


def error_of_loading(training: Training, directory: Path) -> str:
    """Its one line; no parameter has changed."""
    before = {name: tensors["param"] for name, tensors in training.tensors().items()}
    with pytest.raises(UserError) as caught:
        training.load(directory)
    for name, tensors in training.tensors().items():
        assert torch.equal(tensors["param"], before[name])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def hint(iteration: int = 3) -> str:
    return (
        f"; {TRACKER} names iter_{iteration:07d} (complete: iter_0000001, iter_0000002; "
        "--load-latest-valid goes back to a valid one)"
    )


def test_records_every_file(original):
    path = original / "iter_0000003"
    recorded = json.loads((path / DOCUMENT).read_text())["files"]
    assert recorded.keys() == set(FILES) == {file.name for file in path.iterdir()} - {DOCUMENT}
    assert all(entry["bytes"] == (path / name).stat().st_size for name, entry in recorded.items())


@pytest.mark.parametrize("name", FILES)
def test_missing_file(training, saved, name):
    file = saved / "iter_0000003" / name
    file.unlink()
    assert error_of_loading(training, saved) == f"{file}: missing{hint()}"


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(training, saved, name):
    file = saved / "iter_0000003" / name
    size = file.stat().st_size
    os.truncate(file, size - 1)
    expected = f"{file}: {size - 1} bytes instead of {size}{hint()}"
    assert error_of_loading(training, saved) == expected


@pytest.mark.parametrize("position", [0, None, -1])
@pytest.mark.parametrize("name", FILES)
def test_one_bit_of_a_file(training, saved, name, position):
    file = saved / "iter_0000003" / name
    turn_bit(file, position)
    expected = f"{file}: its content differs from what was saved{hint()}"
    assert error_of_loading(training, saved) == expected


def test_document_changed(training, saved):
    file = saved / "iter_0000003" / DOCUMENT
    file.write_text(file.read_text().replace('"consumed_samples": 12', '"consumed_samples": 13'))
    expected = f"{file}: its content differs from what was saved{hint()}"
    assert error_of_loading(training, saved) == expected


def test_document_missing(training, saved):
    file = saved / "iter_0000003" / DOCUMENT
    file.unlink()
    assert error_of_loading(training, saved) == f"{file}: missing{hint()}"


def test_unreadable_file(training, saved, monkeypatch):
    def refuse(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint_files, "_digest", refuse)
    assert "/__0_0.distcp: cannot be read (Input/output error)" in error_of_loading(training, saved)


def test_falls_back_over_all_that_are_damaged(training, saved, capsys):
    cut, turned = saved / "iter_0000003" / SHARD, saved / "iter_0000002" / ".metadata"
    size = cut.stat().st_size
    os.truncate(cut, 100)
    turn_bit(turned)
    assert valid_iteration(saved, fall_back=True) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"--load-latest-valid: skipped iter_0000003: {cut}: 100 bytes instead of {size}",
        f"--load-latest-valid: skipped iter_0000002: {turned}: its content differs from what was "
        "saved",
    ]
    loaded = load_checkpoint(
        saved, training.model, training.optimizer, training.scheduler, SHAPE, iteration=1
    )
    assert loaded["state"]["consumed_samples"] == 4


def test_falls_back_from_a_missing_directory(saved, capsys):
    shutil.rmtree(saved / "iter_0000003")
    with pytest.raises(UserError, match=re.escape(f"iter_0000003: missing{hint()}")):
        valid_iteration(saved)
    assert valid_iteration(saved, fall_back=True) == 2
    assert "skipped iter_0000003: " in capsys.readouterr().out


@pytest.mark.parametrize("tracker", ["3 ", "x", None])
def test_falls_back_from_a_damaged_tracker_to_the_newest(saved, tracker, capsys):
    (saved / TRACKER).unlink()
    if tracker is not None:
        (saved / TRACKER).write_text(tracker)
    assert valid_iteration(saved, fall_back=True) == 3
    printed = capsys.readouterr().out
    assert printed == "" if tracker == "3 " else TRACKER in printed


def test_does_not_go_forward(saved):
    """Whoever sets the tracker file back has a reason to."""
    (saved / TRACKER).write_text("2")
    assert valid_iteration(saved, fall_back=True) == valid_iteration(saved) == 2
    turn_bit(saved / "iter_0000002" / SHARD)
    assert valid_iteration(saved, fall_back=True) == 1


def test_nothing_valid_to_fall_back_to(saved):
    for number in (1, 2, 3):
        (saved / f"iter_000000{number}" / SHARD).unlink()
    with pytest.raises(UserError, match=r"no valid checkpoint to go back to; .*iter_0000001/__0"):
        valid_iteration(saved, fall_back=True)
    with pytest.raises(UserError, match=r"iter_0000003/__0_0\.distcp: missing; .*complete: none"):
        valid_iteration(saved)


def test_nothing_at_all(tmp_path):
    assert valid_iteration(tmp_path / "nowhere", fall_back=True) is None
    (tmp_path / TRACKER).write_text("x")
    with pytest.raises(UserError, match="'x' is not an iteration"):
        valid_iteration(tmp_path, fall_back=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--load-latest-valid", "--load-latest-valid needs --load"),
        ("--save-keep-last 1", "--save-keep-last needs --save"),
        ("--save x --save-keep-last 0", "--save-keep-last must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    model = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8"
    rest = "--micro-batch-size 1 --train-iters 1 --lr 1 --data-path x"
    with pytest.raises(UserError, match=message):
        parse_arguments(f"{model} {rest} {arguments}".split())


def test_keeps_the_last(training, tmp_path):
    for iteration in (1, 2, 3, 4):
        save(training, tmp_path, iteration, keep_last=2)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000003", "iter_0000004", TRACKER}
    assert valid_iteration(tmp_path) == 4
    save(training, tmp_path, 4, keep_last=1)
    assert complete_iterations(tmp_path) == [4]


def test_deletes_only_complete_older_ones(training, saved):
    (saved / "iter_0000003").rename(saved / "iter_0000009")
    foreign, incomplete = saved / "iter_0000000", saved / "iter_0000002"
    foreign.mkdir()
    (foreign / "model.pt").write_bytes(b"")
    (incomplete / SHARD).unlink()
    (saved / "iter_5").mkdir()
    (saved / "iter_0000004").symlink_to(saved / "iter_0000009")
    save(training, saved, 5, keep_last=1)
    numbers = {path.name for path in saved.iterdir()}
    assert numbers == {
        "iter_0000000", "iter_0000002", "iter_0000004", "iter_0000005", "iter_5", "iter_0000009",
        TRACKER,
    }  # fmt: skip


def test_never_deletes_what_the_tracker_names(saved):
    (saved / TRACKER).write_text("1")
    checkpoint_files.delete_older(saved, 3, 1)
    assert complete_iterations(saved) == [1, 3]


def test_killed_deletion_leaves_no_half_checkpoint(training, saved, monkeypatch):
    def die(path: Path) -> None:
        (path / DOCUMENT).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint_files.delete_older(saved, 3, 1)
    assert complete_iterations(saved) == [2, 3]
    assert (saved / ".iter_0000001.deleted").is_dir()
    save(training, saved, 4, keep_last=None)
    assert not list(saved.glob(".iter_*"))
    assert complete_iterations(saved) == [2, 3, 4]


def test_failed_deletion_is_printed(saved, monkeypatch, capsys):
    def refuse(*_: Path) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.os, "rename", refuse)
        checkpoint_files.delete_older(saved, 3, 2)
    expected = f"cannot delete the older checkpoint {saved}/iter_0000001: Read-only file system\n"
    assert capsys.readouterr().out == expected
    assert complete_iterations(saved) == [1, 2, 3]


def test_failed_save_deletes_nothing(training, saved, monkeypatch):
    def refuse(*_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "write_document", refuse)
    with pytest.raises(UserError, match="No space left on device"):
        save(training, saved, 4, keep_last=1)
    assert complete_iterations(saved) == [1, 2, 3] and latest_iteration(saved) == 3
