"""The choice and verification of checkpoints before loading."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.training.checkpointing import read_metadata

from megatron_lowbit.megatron.run.load_source import verify_checkpoint
from megatron_lowbit.storage import files
from tests.hostile_checkpoints import Evil, turn_bit
from tests.megatron.saved_checkpoints import SHARD, choose, refusal

pytestmark = pytest.mark.usefixtures("single_process")


def named(directory: Path) -> str:
    return (directory / files.TRACKER).read_text().strip()


def test_the_newest_is_chosen(saved, capsys):
    assert choose(saved) == (3, None)
    assert choose(saved, ckpt_step=2) == (2, 2)
    assert capsys.readouterr().out == ""


def test_nothing_to_load(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        for latest_valid in (False, True):
            assert choose(folder, load_latest_valid=latest_valid) == (None, None)


@pytest.mark.parametrize("name", [SHARD, ".metadata", "metadata.json"])
def test_a_damaged_file_is_named(saved, name):
    file = saved / "iter_0000003" / name
    others = " (complete: iter_0000001, iter_0000002; --load-latest-valid goes back to a valid one)"
    turn_bit(file)
    assert refusal(saved) == f"{file}: its content differs from what was saved{others}"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert refusal(saved) == f"{file}: {size - 1} bytes instead of {size}{others}"
    file.unlink()
    assert refusal(saved) == f"{file}: missing{others}"


def test_a_folder_that_is_missing(saved):
    shutil.rmtree(saved / "iter_0000003")
    assert refusal(saved).startswith(f"{saved / 'iter_0000003'}: missing (complete: ")
    assert refusal(saved, ckpt_step=9).startswith(f"{saved / 'iter_0000009'}: missing (")


def test_it_goes_back_over_all_that_are_damaged(saved, capsys):
    cut, turned = saved / "iter_0000003" / SHARD, saved / "iter_0000002" / ".metadata"
    size = cut.stat().st_size
    os.truncate(cut, 100)
    turn_bit(turned)
    assert choose(saved, load_latest_valid=True) == (1, 1)
    assert capsys.readouterr().out.splitlines() == [
        f"--load-latest-valid: skipped iter_0000003: {cut}: 100 bytes instead of {size}",
        f"--load-latest-valid: skipped iter_0000002: {turned}: its content differs from what was "
        "saved",
    ]
    assert named(saved) == "3"


@pytest.mark.parametrize("tracker", ["3 ", "x", None])
def test_it_goes_back_from_a_damaged_tracker_to_the_newest(saved, tracker, capsys):
    (saved / files.TRACKER).unlink()
    if tracker is not None:
        (saved / files.TRACKER).write_text(tracker)
    assert choose(saved, load_latest_valid=True) == (3, 3)
    assert ("'x' is not an iteration" in capsys.readouterr().out) == (tracker == "x")
    # Megatron-LM reads the file, although ``ckpt_step`` names the iteration, and exits with code 0.
    assert tracker is None or read_metadata(str(saved / files.TRACKER)) == (3, False)


def test_a_damaged_tracker_is_refused_where_megatron_lm_would_exit(saved):
    (saved / files.TRACKER).write_text("x")
    assert "'x' is not an iteration" in refusal(saved, ckpt_step=2)
    for number in (1, 2, 3):
        shutil.rmtree(saved / f"iter_000000{number}")
    assert "'x' is not an iteration" in refusal(saved, load_latest_valid=True)


def test_it_does_not_go_forward(saved):
    """A user may have set the tracker file to an older iteration."""
    files.write_tracker(saved, 2)
    assert choose(saved, load_latest_valid=True) == (2, 2)
    turn_bit(saved / "iter_0000002" / SHARD)
    assert choose(saved, load_latest_valid=True) == (1, 1)


def test_nothing_valid_to_go_back_to(saved):
    for number in (1, 2, 3):
        (saved / f"iter_000000{number}" / SHARD).unlink()
    error = refusal(saved, load_latest_valid=True)
    assert error.startswith(f"{saved}: no valid checkpoint; the last one tried: ")
    assert error.endswith(f"{saved}/iter_0000001/{SHARD}: missing")
    assert refusal(saved).endswith(f"iter_0000003/{SHARD}: missing (complete: none)")


@pytest.mark.parametrize("latest_valid", [False, True])
def test_an_empty_tracker_is_restored(saved, latest_valid, capsys):
    """Megatron-LM truncates the file before it writes the new iteration."""
    (saved / "iter_0000003" / SHARD).unlink()
    (saved / files.TRACKER).write_text("")
    assert choose(saved, load_latest_valid=latest_valid)[0] == 2
    assert named(saved) == "2"
    assert "empty after a killed save; restored to 2" in capsys.readouterr().out


def test_a_missing_tracker_is_restored(saved, capsys):
    """Megatron-LM would begin a new run, and replace the checkpoints."""
    tracker = saved / files.TRACKER
    tracker.unlink()
    assert choose(saved)[0] is None and not tracker.exists()
    assert choose(saved, save=str(saved)) == (3, None)
    assert named(saved) == "3"
    assert f"{tracker}: missing; restored to 3\n" in capsys.readouterr().out


def test_an_empty_tracker_of_nothing_complete(tmp_path):
    (tmp_path / files.TRACKER).write_text("\n")
    assert "'' is not an iteration" in refusal(tmp_path)
    assert named(tmp_path) == ""


def test_a_release_is_verified(saved):
    shutil.copytree(saved / "iter_0000003", saved / "release")
    (saved / files.TRACKER).write_text("release")
    assert choose(saved) == choose(saved, load_latest_valid=True) == (None, None)
    turn_bit(saved / "release" / SHARD)
    assert "--ckpt-step 2: Megatron-LM loads" in refusal(saved, ckpt_step=2)
    assert f"release/{SHARD}: its content differs" in refusal(saved)


def test_without_a_document_lengths_are_compared(saved, capsys):
    path = saved / "iter_0000003"
    (path / files.DOCUMENT).unlink()
    assert choose(saved) == (3, None)
    expected = f"{path}: no lowbit.json: loaded without comparing checksums\n"
    assert capsys.readouterr().out == expected
    os.truncate(path / SHARD, 100)
    assert f"{path / SHARD}: 100 bytes instead of " in refusal(saved)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_planted_pickle_that_is_recorded_does_not_run(saved, tmp_path, name):
    """An attacker would also record the checksum; without one: test_hostile_sources.py."""
    path, trace = saved / "iter_0000003", tmp_path / "trace"
    if name == "common.pt":
        torch.save({"iteration": Evil(trace)}, path / name)
    else:
        (path / name).write_bytes(pickle.dumps(Evil(trace)))
    files.write_document(path, {"files": files.checksums(path)})
    assert refusal(saved).startswith(f"{path / name}: refused: ")
    assert not trace.exists()


def test_ranks_share_the_reading(saved, monkeypatch):
    read = []
    monkeypatch.setattr(files, "check_files", lambda path, recorded, names: read.append(names))
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        verify_checkpoint(saved / "iter_0000003")
    # The largest file first.
    assert read == [[SHARD, "metadata.json"], [".metadata"]]


def test_an_empty_tracker_names_the_newest_and_not_the_one_changed_last(saved):
    (saved / files.TRACKER).write_text("")
    (saved / "iter_0000001" / "more").write_text("")
    assert choose(saved)[0] == 3
