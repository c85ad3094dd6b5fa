"""Names and checksums of checkpoints in a folder; their replacement and deletion."""

import os
import re
import shutil
from pathlib import Path

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.storage import files
from tests.hostile_checkpoints import turn_bit

SHARD = "__0_0.distcp"
FILES = (SHARD, ".metadata", "metadata.json")


@pytest.fixture
def newest(saved) -> Path:
    return saved / "iter_0000003"


def error_of_checking(path: Path) -> str:
    """Return the one line that names what is wrong with a checkpoint's files."""
    with pytest.raises(UserError) as caught:
        recorded = files.read_document(path)["files"]
        files.check_files(path, recorded, sorted(recorded))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- what lowbit.json records ----------------------------------------------------------------------


def test_every_file_is_recorded(newest):
    (newest / "folder").mkdir()
    (newest / "folder" / "file").write_bytes(b"123")
    files.write_document(newest, {"files": files.checksums(newest)})
    recorded = files.read_document(newest)["files"]
    assert recorded.keys() == {*FILES, "folder/file"}
    sizes = {name: entry["bytes"] for name, entry in recorded.items()}
    assert sizes == {name: (newest / name).stat().st_size for name in recorded}
    assert sizes["folder/file"] == 3
    files.check_files(newest, recorded, recorded)
    assert not list(newest.glob("*.partial"))


@pytest.mark.parametrize("name", FILES)
def test_a_changed_cut_or_missing_file(newest, name):
    file = newest / name
    for position in (0, None, -1):
        turn_bit(file, position)
        assert error_of_checking(newest) == f"{file}: its content differs from what was saved"
        turn_bit(file, position)
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert error_of_checking(newest) == f"{file}: {size - 1} bytes instead of {size}"
    file.unlink()
    assert error_of_checking(newest) == f"{file}: missing"


def test_only_the_named_files_are_read(newest):
    """Ranks share them out."""
    recorded = files.read_document(newest)["files"]
    turn_bit(newest / SHARD)
    files.check_files(newest, recorded, [".metadata"])
    with pytest.raises(UserError):
        files.check_files(newest, recorded, [".metadata", SHARD])


def test_unreadable_file(newest, monkeypatch):
    def refuse(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(files, "_digest", refuse)
    expected = f"{newest / '.metadata'}: cannot be read (Input/output error)"
    assert error_of_checking(newest) == expected


def test_document_changed_or_missing(newest):
    file = newest / files.DOCUMENT
    size = (newest / SHARD).stat().st_size
    file.write_text(file.read_text().replace(str(size), str(size + 1)))
    assert error_of_checking(newest) == f"{file}: its content differs from what was saved"
    file.unlink()
    assert error_of_checking(newest) == f"{file}: missing"
    shutil.rmtree(newest)
    assert error_of_checking(newest) == f"{newest}: missing"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "needs the entry 'format_version'"),
        ('{"format_version": [3]}', "format_version [3]: must be an integer"),
        ('{"format_version": 3}', "its content differs"),
        ('{"format_version": 3, "files": {}}', "its content differs"),
    ],
)
def test_damaged_document(newest, content, problem):
    (newest / files.DOCUMENT).write_text(content)
    assert error_of_checking(newest).startswith(f"{newest / files.DOCUMENT}: {problem}")


ENTRY = {"bytes": 1, "blake2b": ""}


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        (None, "files: holds no JSON object, but None"),
        ([SHARD], "files: holds no JSON object"),
        ({SHARD: 7}, f"files: {SHARD}: holds no JSON object, but 7"),
        ({SHARD: {}}, f"files: {SHARD}: needs the entry 'bytes'"),
        ({SHARD: ENTRY | {"bytes": -1}}, f"files: {SHARD}: bytes -1: must be"),
        ({SHARD: ENTRY | {"bytes": 10**400}}, f"files: {SHARD}: bytes 1000"),
        ({SHARD: ENTRY | {"blake2b": 0}}, f"files: {SHARD}: blake2b 0: must be"),
        ({"../iter_0000002": ENTRY}, "files: ../iter_0000002: not the name of a file in"),
        ({"/dev/zero": {"bytes": 0, "blake2b": ""}}, "files: /dev/zero: not the name"),
        ({"a\0b": ENTRY}, "files: a\\x00b: not the name"),
        ({"\ud800": ENTRY}, "files: \\ud800: not the name"),
        ({"": ENTRY}, "files: : not the name"),
    ],
)
def test_document_of_wrong_types_with_a_valid_digest(newest, recorded, problem):
    files.write_document(newest, {"files": recorded})
    assert error_of_checking(newest).startswith(f"{newest / files.DOCUMENT}: {problem}")
    assert files.complete_iterations(newest.parent) == [1, 2]


@pytest.mark.parametrize("version", [2, 4])
def test_document_of_another_version(newest, version):
    document = newest / files.DOCUMENT
    text = document.read_text()
    assert files.FORMAT_VERSION == 3
    document.write_text(text.replace('"format_version": 3', f'"format_version": {version}'))
    expected = f"{document}: format_version {version}, but this version of megatron-lowbit reads 3"
    assert error_of_checking(newest) == expected


def test_a_document_that_cannot_be_written_leaves_the_old_one(newest, monkeypatch):
    before = (newest / files.DOCUMENT).read_text()

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        files.write_document(newest, {"files": {}})
    assert (newest / files.DOCUMENT).read_text() == before


# -- the tracker file ------------------------------------------------------------------------------


def test_the_tracker_names_the_latest(saved, tmp_path):
    assert files.latest_iteration(saved) == files.latest_iteration(str(saved)) == 3
    files.write_tracker(saved, 2)
    assert files.latest_iteration(saved) == 2
    assert (saved / files.TRACKER).read_text() == "2\n"
    assert not list(saved.glob(".*"))
    assert files.latest_iteration(tmp_path) is files.latest_iteration(tmp_path / "no") is None


@pytest.mark.parametrize("content", ["", "12x", "-1", "1.0", "٣", "release", "1" * 300, "9" * 9999])
def test_a_tracker_without_an_iteration(saved, content):
    (saved / files.TRACKER).write_text(content)
    complete = "complete: iter_0000001, iter_0000002, iter_0000003; --load-latest-valid"
    with pytest.raises(UserError, match=f"'{content[:40]}' is not an iteration; .*{complete}"):
        files.latest_iteration(saved)


def test_a_tracker_that_is_no_text_or_a_folder(saved):
    tracker = saved / files.TRACKER
    tracker.write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(UserError, match="is not an iteration") as caught:
        files.latest_iteration(saved)
    assert len(str(caught.value).replace(str(saved), "")) < 300
    os.truncate(tracker, 2**40)
    with pytest.raises(UserError, match=f"{files.TRACKER}: has 1099511627776 bytes"):
        files.latest_iteration(saved)
    tracker.unlink()
    tracker.mkdir()
    for read in (files.latest_iteration, files.release):
        with pytest.raises(UserError, match=f"{files.TRACKER}: is no file"):
            read(saved)


def test_a_release_is_no_iteration(saved):
    assert files.release(saved) is None
    (saved / files.TRACKER).write_text("release\n")
    assert files.release(saved) == files.release(str(saved)) == saved / "release"
    (saved / files.TRACKER).unlink()
    assert files.release(saved) is None


# -- which checkpoints there are -------------------------------------------------------------------


def test_iterations_are_folders_of_seven_digits_or_more(saved):
    for name in ("iter_5", "iter_00000x7", "iter_0000008_old", ".iter_0000009.deleted", "release"):
        (saved / name).mkdir()
    (saved / "iter_0000010").write_text("a file")
    (saved / "iter_12345678").mkdir()
    assert files.iterations(saved) == [1, 2, 3, 12345678]
    assert files.complete_iterations(saved) == [1, 2, 3]


def test_complete_is_what_has_its_full_length(saved):
    os.truncate(saved / "iter_0000001" / SHARD, 100)
    (saved / "iter_0000002" / files.DOCUMENT).write_text("{")
    turn_bit(saved / "iter_0000003" / SHARD)  # the content is not read
    assert files.complete_iterations(saved) == [3]


@pytest.mark.parametrize("name", FILES)
def test_complete_without_a_document(saved, name):
    """As Megatron-LM leaves a checkpoint: the lengths are in its metadata."""
    first, second, third = (saved / f"iter_000000{number}" for number in (1, 2, 3))
    for path in (first, second, third):
        (path / files.DOCUMENT).unlink()
    (second / name).unlink()
    os.truncate(third / name, (third / name).stat().st_size - 1)
    assert files.complete_iterations(saved) == [1]


def test_alternatives(saved, write_checkpoint):
    more = "--load-latest-valid goes back to a valid one"
    assert files.alternatives(saved, besides=3) == f"complete: iter_0000001, iter_0000002; {more}"
    for number in range(4, 8):
        shutil.copytree(saved / "iter_0000003", files.iteration_directory(saved, number))
    names = ", ".join(f"iter_000000{number}" for number in range(3, 8))
    assert files.alternatives(saved) == f"complete: ..., {names}; {more}"
    assert files.alternatives(saved / "nowhere") == "complete: none"


def test_the_newest_complete_one_is_the_last_saved(saved):
    """Whatever the times of the folders are."""
    os.utime(saved / "iter_0000001")
    assert files.last_saved(saved) == 3
    os.truncate(saved / "iter_0000003" / SHARD, 100)
    assert files.last_saved(saved) == 2
    for number in (1, 2):
        os.truncate(saved / f"iter_000000{number}" / SHARD, 100)
    assert files.last_saved(saved) is files.last_saved(saved / "nowhere") is None


def test_the_last_saved_of_a_run_that_went_back(saved):
    """Iterations above the one being saved are of before, until the run has reached them."""
    files.note_saving(saved, 2)
    assert files.last_saved(saved) == 2
    os.truncate(saved / "iter_0000002" / SHARD, 100)
    assert files.last_saved(saved) == 1
    files.note_saving(saved, 3)
    assert files.last_saved(saved) == 3 and not (saved / files.SAVING).exists()
    for content in ("", "x", "9" * 99, "0"):
        (saved / files.SAVING).write_text(content)
        assert files.last_saved(saved) == 3


# -- replacement and deletion ----------------------------------------------------------------------


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_last_are_kept(saved):
    for keep, left in ((9, [1, 2, 3]), (3, [1, 2, 3]), (2, [2, 3]), (1, [3])):
        files.delete_older(saved, 3, keep)
        assert names(saved) == {*(f"iter_000000{number}" for number in left), files.TRACKER}


def test_only_complete_older_ones_are_deleted(saved, write_checkpoint):
    (saved / "iter_0000003").rename(saved / "iter_0000009")
    (saved / "iter_0000000").mkdir()
    (saved / "iter_0000002" / "__0_0.distcp").unlink()
    (saved / "iter_5").mkdir()
    (saved / "iter_0000004").symlink_to(saved / "iter_0000009")
    write_checkpoint(saved / "iter_0000005")
    files.write_tracker(saved, 5)
    files.delete_older(saved, 5, 1)
    assert names(saved) == {
        "iter_0000000", "iter_0000002", "iter_0000004", "iter_0000005", "iter_5", "iter_0000009",
        files.TRACKER,
    }  # fmt: skip


def test_what_the_tracker_names_is_never_deleted(saved):
    files.write_tracker(saved, 1)
    files.delete_older(saved, 3, 1)
    assert files.complete_iterations(saved) == [1, 3]
    (saved / files.TRACKER).write_text("?")
    with pytest.raises(UserError, match=re.escape(f"{saved / files.TRACKER}: '?' is not")):
        files.delete_older(saved, 3, 1)


def test_a_killed_deletion_leaves_no_half_checkpoint(saved, monkeypatch):
    def die(path: Path, **_: object) -> None:
        (path / files.DOCUMENT).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            files.delete_older(saved, 3, 2)
    assert files.iterations(saved) == [2, 3]
    assert (saved / ".iter_0000001.deleted").is_dir()
    files.delete_older(saved, 3, 2)
    assert names(saved) == {"iter_0000002", "iter_0000003", files.TRACKER}


def test_a_failed_deletion_is_printed(saved, monkeypatch, capsys):
    def refuse(*_: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", refuse)
    files.delete_older(saved, 3, 2)
    expected = f"cannot delete the older checkpoint {saved}/iter_0000001: Read-only file system\n"
    assert capsys.readouterr().out == expected
    assert files.complete_iterations(saved) == [1, 2, 3]


def test_checkpoints_that_a_killed_run_did_not_finish_are_deleted(saved, capsys):
    """Without ``.metadata`` nobody can read their shards."""
    for number, names in (
        (4, ["__0_0.distcp", "__1_0.distcp"]), (5, ["__0_0.distcp", ".metadata.tmp"]), (6, []),
        (7, ["__0_0.distcp", "notes.txt"]), (8, ["mp_rank_00"]), (9, ["__0_0.distcp"]),
        (10, ["__0_0.distcp", ".metadata"]), (11, ["__0_0.distcp", "lowbit.json"]),
    ):  # fmt: skip
        path = files.iteration_directory(saved, number)
        path.mkdir()
        for name in names:
            (path / name).write_text("half")
    (saved / "iter_0000012").symlink_to(saved / "iter_0000004")
    (saved / "iter_5").mkdir()
    files.write_tracker(saved, 9)
    files.delete_unfinished(saved)
    kept = (1, 2, 3, 7, 8, 9, 10, 11)
    assert files.iterations(saved) == list(kept)
    assert (saved / "iter_0000012").is_symlink() and (saved / "iter_5").is_dir()
    assert capsys.readouterr().out.splitlines() == [
        f"{saved}/iter_000000{number}: deleted, since a killed run did not finish it"
        for number in (4, 5, 6)
    ]


def test_hidden_folders_of_other_names_stay(saved):
    for name in (".iter_mine.deleted", ".iter_mine.replaced", "iter_mine", ".iter_5.deleted"):
        (saved / name).mkdir()
    before = names(saved)
    (saved / ".iter_0000009.deleted").mkdir()
    files.settle_replaced(saved)
    assert names(saved) == before
