"""Replacement and deletion of checkpoints' directories."""

import os
import re
from pathlib import Path

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.storage import files, replacement


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_directory_takes_the_place_of_another(saved):
    partial, final = saved / ".iter_0000003.partial", saved / "iter_0000003"
    partial.mkdir()
    (partial / "new").write_text("")
    replacement.replace_directory(partial, final)
    assert names(final) == {"new"}
    replacement.replace_directory(final, saved / "iter_0000004")
    assert names(saved) == {"iter_0000001", "iter_0000002", "iter_0000004", files.TRACKER}


class Killed(BaseException):
    """Stand-in for a SIGKILL."""


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_killed_replacement_loses_nothing(tmp_path, monkeypatch, kind, renames):
    """Before the first rename, between the two, and before the old one is deleted."""
    partial, final = tmp_path / "partial", tmp_path / "final"
    partial.mkdir()
    (partial / "new").write_text("")
    if kind == "folder":
        final.mkdir()
        (final / "old").write_text("")
    elif kind == "file":
        final.write_text("old")
    else:
        final.symlink_to("nowhere")
    rename, left = os.rename, [renames]

    def rename_or_die(*names: Path) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        rename(*names)

    def die(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(replacement.os, "rename", rename_or_die)
        patch.setattr(replacement, "_remove", die)
        with pytest.raises(Killed):
            replacement.replace_directory(partial, final)
    assert replacement.restore_replaced(final) == (renames == 1)
    assert names(tmp_path) == ({"final"} if renames == 2 else {"final", "partial"})
    is_new = final.is_dir() and (final / "new").exists()
    assert is_new == (renames == 2)
    if not is_new:
        replacement.replace_directory(partial, final)
    assert names(tmp_path) == {"final"} and names(final) == {"new"}


@pytest.mark.parametrize(("keep", "left"), [(1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (9, [1, 2, 3])])
def test_the_last_are_kept(saved, keep, left):
    replacement.delete_older(saved, 3, keep)
    assert files.iterations(saved) == left
    assert names(saved) == {*(f"iter_000000{number}" for number in left), files.TRACKER}


def test_only_complete_older_ones_are_deleted(saved, write_checkpoint):
    (saved / "iter_0000003").rename(saved / "iter_0000009")
    (saved / "iter_0000000").mkdir()
    (saved / "iter_0000002" / "__0_0.distcp").unlink()
    (saved / "iter_5").mkdir()
    (saved / "iter_0000004").symlink_to(saved / "iter_0000009")
    write_checkpoint(saved / "iter_0000005")
    files.write_tracker(saved, 5)
    replacement.delete_older(saved, 5, 1)
    assert names(saved) == {
        "iter_0000000", "iter_0000002", "iter_0000004", "iter_0000005", "iter_5", "iter_0000009",
        files.TRACKER,
    }  # fmt: skip


def test_what_the_tracker_names_is_never_deleted(saved):
    files.write_tracker(saved, 1)
    replacement.delete_older(saved, 3, 1)
    assert files.complete_iterations(saved) == [1, 3]


def test_a_killed_deletion_leaves_no_half_checkpoint(saved, monkeypatch):
    def die(path: Path, **_: object) -> None:
        (path / files.DOCUMENT).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(replacement.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            replacement.delete_older(saved, 3, 2)
    assert files.iterations(saved) == [2, 3]
    assert (saved / ".iter_0000001.deleted").is_dir()
    replacement.delete_older(saved, 3, 2)
    assert names(saved) == {"iter_0000002", "iter_0000003", files.TRACKER}


def test_a_failed_deletion_is_printed(saved, monkeypatch, capsys):
    def refuse(*_: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(replacement.os, "rename", refuse)
    replacement.delete_older(saved, 3, 2)
    expected = f"cannot delete the older checkpoint {saved}/iter_0000001: Read-only file system\n"
    assert capsys.readouterr().out == expected
    assert files.complete_iterations(saved) == [1, 2, 3]


def test_error_messages_name_the_folder(saved):
    (saved / files.TRACKER).write_text("?")
    with pytest.raises(UserError, match=re.escape(f"{saved / files.TRACKER}: '?' is not")):
        replacement.delete_older(saved, 3, 1)


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
    replacement.delete_unfinished(saved)
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
    replacement.settle_replaced(saved)
    assert names(saved) == before
