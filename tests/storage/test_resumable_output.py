"""Replacement of an output's folder; tests/conversion/test_resume.py has whole conversions."""

import os
from pathlib import Path

import pytest

from megatron_lowbit.storage import files
from megatron_lowbit.storage.resumable_output import (
    replace_directory,
    restore_replaced,
    resumable_output,
)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_directory_takes_the_place_of_another(saved):
    partial, final = saved / ".iter_0000003.partial", saved / "iter_0000003"
    partial.mkdir()
    (partial / "new").write_text("")
    replace_directory(partial, final)
    assert names(final) == {"new"}
    replace_directory(final, saved / "iter_0000004")
    assert names(saved) == {"iter_0000001", "iter_0000002", "iter_0000004", files.TRACKER}


def test_a_log_has_a_line_for_each_tenth(tmp_path, capsys):
    task = {"source": str(tmp_path / "source")}
    with resumable_output(tmp_path / "out", False, task, 20) as partial:
        for name, parts in (("a", 3), ("b", 17)):
            partial.write(partial.path / name, [b""] * parts, lambda file, part: None)
    lines = [f"{tenths}0% of 20 tensors written" for tenths in range(1, 11)]
    assert capsys.readouterr().err.splitlines() == lines


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
        patch.setattr(os, "rename", rename_or_die)
        patch.setattr(files, "remove", die)
        with pytest.raises(Killed):
            replace_directory(partial, final)
    assert restore_replaced(final) == (renames == 1)
    assert names(tmp_path) == ({"final"} if renames == 2 else {"final", "partial"})
    is_new = final.is_dir() and (final / "new").exists()
    assert is_new == (renames == 2)
    if not is_new:
        replace_directory(partial, final)
    assert names(tmp_path) == {"final"} and names(final) == {"new"}
