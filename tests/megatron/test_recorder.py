"""Records of checkpoints after saving."""

import re
import shutil
import threading
from pathlib import Path

import pytest

from megatron_lowbit.megatron.run.checkpoint_guard import Recorder
from megatron_lowbit.storage import files
from tests.hostile_checkpoints import turn_bit
from tests.megatron.saved_checkpoints import SHARD, choose, hidden, is_recorded, refusal

pytestmark = pytest.mark.usefixtures("single_process")


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


def test_an_empty_tracker_names_no_checkpoint_of_an_earlier_run(saved, save):
    recording = recorder(saved)
    save(recording, 2)
    recording.close()
    (saved / files.TRACKER).write_text("")
    assert choose(saved)[0] == 2
