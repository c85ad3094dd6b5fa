"""Verification of checkpoints before loading, and their records after saving."""

import os
import pickle
import re
import shutil
import threading
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.training import global_vars, training
from megatron.training.checkpointing import read_metadata

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run.checkpoint_guard import CheckpointGuard, Recorder
from megatron_lowbit.megatron.run.load_source import choose_checkpoint, verify_checkpoint
from megatron_lowbit.megatron.run.metrics import MetricsWriter
from megatron_lowbit.storage import files
from tests.hostile_checkpoints import Evil

pytestmark = pytest.mark.usefixtures("single_process")

SHARD = "__0_0.distcp"


def arguments(load: Path | None, **changes: object) -> Namespace:
    values = {"ckpt_step": None, "load_latest_valid": False, "save": None, "save_keep_last": None,
              "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None,
              "pretrained_checkpoint": None, "mock_data": True, "finetune": True}  # fmt: skip
    return Namespace(load=load and str(load), **{**values, **changes})


def choose(load: Path, **changes: object) -> tuple[int | None, int | None]:
    """Return the chosen iteration and Megatron-LM's ``ckpt_step``."""
    args = arguments(load, **changes)
    return choose_checkpoint(args), args.ckpt_step


def refusal(load: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        choose(load, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def turn_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def named(directory: Path) -> str:
    return (directory / files.TRACKER).read_text().strip()


# -- before loading --------------------------------------------------------------------------------


def test_the_newest_is_chosen(saved, capsys):
    assert choose(saved) == (3, None)
    assert choose(saved, ckpt_step=2) == (2, 2)
    assert capsys.readouterr().out == ""


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


def test_an_empty_tracker_names_no_checkpoint_of_an_earlier_run(saved, save):
    recording = recorder(saved)
    save(recording, 2)
    recording.close()
    (saved / files.TRACKER).write_text("")
    assert choose(saved)[0] == 2


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


# -- after saving ----------------------------------------------------------------------------------


def recorder(directory: Path, keep_last: int | None = None) -> Recorder:
    return Recorder(directory, keep_last)


def step(recorder: Recorder, iteration: int) -> None:
    """Begin a step, and wait for its records."""
    recorder.begin_step(iteration, True)
    if recorder._thread is not None:
        recorder._thread.join()


@pytest.fixture
def save(saved, write_checkpoint):
    """Function that saves an iteration as Megatron-LM does, into an existing folder."""

    def save(recording: Recorder, iteration: int) -> Path:
        path = files.iteration_directory(saved, iteration)
        recording.begin_save(path)
        write_checkpoint(path)
        (saved / files.TRACKER).write_text(str(iteration))
        return path

    return save


def is_recorded(path: Path) -> bool:
    """Return True if a checkpoint has a record; check that it matches the files."""
    if not (path / files.DOCUMENT).exists():
        return False
    recorded = files.read_document(path)["files"]
    assert recorded.keys() == {file.name for file in path.iterdir()} - {files.DOCUMENT}
    files.check_files(path, recorded, recorded)
    return True


def test_a_new_checkpoint_is_recorded_at_the_next_step(saved, save):
    recording = recorder(saved)
    step(recording, 3)
    assert recording._thread is None
    path = save(recording, 4)
    assert not is_recorded(path)
    step(recording, 4)
    assert is_recorded(path)
    assert not recording._begun  # It does not grow with the run.
    thread = recording._thread
    step(recording, 5)
    assert recording._thread is thread


def test_the_last_checkpoint_is_recorded_at_the_end(saved, save):
    recording = recorder(saved)
    path = save(recording, 4)
    recording.close()
    assert is_recorded(path)


def test_one_that_came_while_another_was_read_is_recorded_at_the_end(saved, save, monkeypatch):
    going_on = threading.Event()
    checksums = files.checksums

    def wait(path: Path) -> dict:
        going_on.wait(timeout=10)
        return checksums(path)

    monkeypatch.setattr(files, "checksums", wait)
    recording = recorder(saved)
    first = save(recording, 4)
    recording.begin_step(4, True)
    second, third = save(recording, 5), save(recording, 6)
    recording.begin_step(6, True)
    assert not is_recorded(first)
    going_on.set()
    recording.close()
    assert is_recorded(first) and is_recorded(second) and is_recorded(third)


def test_a_tracker_that_is_being_written_is_read_later(saved, save):
    recording = recorder(saved)
    path = save(recording, 4)
    (saved / files.TRACKER).write_text("")
    step(recording, 4)
    assert not is_recorded(path)
    (saved / files.TRACKER).write_text("4")
    step(recording, 5)
    assert is_recorded(path)


def test_an_incomplete_checkpoint_is_not_recorded(saved, save):
    recording = recorder(saved)
    path = save(recording, 4)
    (path / ".metadata").unlink()
    (saved / files.TRACKER).write_text("3")
    step(recording, 4)
    recording.close()
    assert not (path / files.DOCUMENT).exists()


def test_a_first_run_records_everything(tmp_path, write_checkpoint):
    directory = tmp_path / "new"
    recording = recorder(directory)
    step(recording, 0)
    path = directory / "iter_0000001"
    recording.begin_save(path)
    write_checkpoint(path)
    files.write_tracker(directory, 1)
    step(recording, 1)
    assert is_recorded(path)


def test_older_ones_are_deleted_once_the_new_one_is_recorded(saved, save):
    recording = recorder(saved, keep_last=2)
    save(recording, 4)
    step(recording, 4)
    assert files.iterations(saved) == [3, 4]
    save(recording, 5)
    recording.close()
    assert files.iterations(saved) == [4, 5]


def test_a_failure_to_record_is_printed(saved, save, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    recording = recorder(saved, keep_last=1)
    path = save(recording, 4)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_document", refuse)
        step(recording, 4)
    assert capsys.readouterr().out == (
        f"cannot record the files of {path}: No space left on device\n"
    )
    assert files.iterations(saved) == [1, 2, 3, 4]


@pytest.mark.parametrize("ending", ["killed", "closed", "saved"])
def test_a_damaged_checkpoint_stays_refused_after_a_run_went_back(saved, save, ending):
    """The tracker file names the damaged checkpoint until the next save."""
    shutil.rmtree(saved / "iter_0000002")
    turn_bit(saved / "iter_0000003" / SHARD)
    assert choose(saved, load_latest_valid=True) == (1, 1)
    recording = recorder(saved, keep_last=1)
    step(recording, 1)
    if ending == "saved":
        save(recording, 2)
    if ending != "killed":
        recording.close()
    start = 2 if ending == "saved" else 1
    assert choose(saved, load_latest_valid=True) == (start, start)
    if ending != "saved":
        assert re.search("iter_0000003/.* its content differs", refusal(saved))


# -- saving an iteration again ---------------------------------------------------------------------


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob(".iter_*"))


@pytest.mark.parametrize("ending", ["next step", "closed", "killed"])
def test_an_older_checkpoint_goes_once_the_new_one_is_there(saved, save, ending):
    recording = recorder(saved)
    (saved / "iter_0000002" / "old").write_text("")
    path = save(recording, 2)
    assert hidden(saved) == [".iter_0000002.replaced"]
    if ending == "next step":
        step(recording, 2)
    elif ending == "closed":
        recording.close()
    else:
        files.settle_replaced(saved)
    assert hidden(saved) == [] and not (path / "old").exists()
    assert is_recorded(path) == (ending != "killed")
    assert choose(saved)[0] == 2


@pytest.mark.parametrize("left", ["nothing", "a shard", "all but its configuration"])
def test_a_save_that_was_killed_leaves_the_older_checkpoint(saved, write_checkpoint, capsys, left):
    """The older checkpoint may be the only one, and keeps its record."""
    for number in (1, 2):
        shutil.rmtree(saved / f"iter_000000{number}")
    path = saved / "iter_0000003"
    before = files.checksums(path)
    recorder(saved).begin_save(path)
    assert files.iterations(saved) == []
    if left != "nothing":
        write_checkpoint(path)
        (path / files.CONFIG).unlink()
        (path / "more").write_text("")
    if left == "a shard":
        (path / files.METADATA).unlink()
    if left != "all but its configuration":
        assert f"a start with --save {saved} restores" in refusal(saved)
    files.settle_replaced(saved)
    assert capsys.readouterr().out == (
        f"{path}: put back, since a killed run did not finish its replacement\n"
    )
    assert hidden(saved) == [] and choose(saved)[0] == 3
    assert files.checksums(path) == before and is_recorded(path)


def test_a_save_in_the_background_keeps_the_older_checkpoint_until_it_ends(saved, write_checkpoint):
    recording = recorder(saved)
    path = saved / "iter_0000003"
    recording.begin_save(path)
    write_checkpoint(path)
    (path / files.METADATA).rename(metadata := path / "later")
    step(recording, 3)
    assert hidden(saved) == [".iter_0000003.replaced"]
    metadata.rename(path / files.METADATA)
    step(recording, 4)
    assert hidden(saved) == []


def test_two_saves_of_an_iteration_in_a_row(saved, save):
    """Megatron-LM saves twice if the batch size changes at the interval of saves."""
    recording = recorder(saved)
    save(recording, 3)
    (saved / "iter_0000003" / "second").write_text("")
    recording.begin_save(saved / "iter_0000003")
    files.settle_replaced(saved)
    assert (saved / "iter_0000003" / "second").exists()
    recording.close()
    assert choose(saved)[0] == 3


def test_what_is_being_written_stays_in_its_place(saved, save):
    recording = recorder(saved)
    path = save(recording, 3)
    (path / files.METADATA).unlink()
    recording.begin_save(path)
    assert path.exists() and is_recorded(saved / ".iter_0000003.replaced")


def test_a_linked_checkpoint_keeps_its_files(saved, save, tmp_path):
    archive, path = tmp_path / "archive", saved / "iter_0000003"
    path.rename(archive)
    path.symlink_to(archive)
    before = files.checksums(archive)
    recording = recorder(saved)
    save(recording, 3)
    recording.close()
    assert not path.is_symlink() and files.checksums(archive) == before
    assert hidden(saved) == []


# -- in a run --------------------------------------------------------------------------------------


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


def test_what_a_run_has_logged_is_written_before_a_save(saved, monkeypatch):
    """After a resumption, the file has every iteration once."""
    writer = MetricsWriter(saved, None, log_interval=4, tokens=1)
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


def test_a_link_to_nothing_is_no_folder_of_another_program(saved, tmp_path):
    (saved / "iter_0000009").symlink_to(tmp_path / "gone")
    take(saved)
    assert (saved / "iter_0000009").is_symlink()


def test_an_empty_tracker_names_the_newest_and_not_the_one_changed_last(saved):
    (saved / files.TRACKER).write_text("")
    (saved / "iter_0000001" / "more").write_text("")
    assert choose(saved)[0] == 3
