"""The folder of cached sample indices: its name, its lock, and what a killed run leaves in it."""

import fcntl
import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from megatron_lowbit.data.index_cache import building, cache_folder
from megatron_lowbit.errors import UserError

# isort: split
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_dataset(prefix, documents=40, length=25) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(documents):
        builder.add_document(np.arange(length), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def prefix(tmp_path) -> str:
    return write_dataset(tmp_path / "data")


def test_the_cache_is_beside_the_first_dataset(prefix, tmp_path):
    other = write_dataset(tmp_path / "other", documents=3)
    folder = Path(cache_folder([prefix, other]))
    assert folder.is_dir() and folder.parent == tmp_path / "cache"
    assert cache_folder([prefix, other]) == str(folder) != cache_folder([prefix])


def test_new_data_under_an_old_name_has_another_cache(prefix):
    before = cache_folder([prefix])
    write_dataset(prefix, documents=20, length=50)
    assert cache_folder([prefix]) != before


def test_a_cache_that_cannot_be_written(prefix, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(UserError, match="cache: cannot be written to; give --data-cache-path"):
            cache_folder([prefix])
    for folder in (tmp_path / "cache").iterdir():
        folder.rmdir()
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cache: cannot be written to; give --data-cache-path"):
        cache_folder([prefix])


# -- building --------------------------------------------------------------------------------------


def test_what_does_not_load_is_deleted_and_the_rest_stays(tmp_path, capsys):
    np.save(tmp_path / "whole.npy", np.arange(100))
    np.save(tmp_path / "cut.npy", np.arange(100))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    content = (tmp_path / "cut.npy").read_bytes()
    for cut in (len(content) - 1, 200, 64, 0):
        (tmp_path / "cut.npy").write_bytes(content[:cut])
        with building(tmp_path):
            assert sorted(path.name for path in tmp_path.glob("*.npy")) == ["whole.npy"]
        assert f"{tmp_path}/cut.npy: cut short" in capsys.readouterr().out


def is_locked(folder: Path) -> bool:
    with open(folder / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def hold(folder: Path, held: Event) -> None:
    with building(folder):
        held.set()
        time.sleep(60)


def test_others_wait_until_a_run_has_built_or_was_killed(tmp_path):
    with building(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    holder = fork.Process(target=hold, args=(tmp_path, held), daemon=True)
    holder.start()
    assert held.wait(60) and is_locked(tmp_path)
    holder.kill()
    holder.join()
    assert not is_locked(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--data-cache-path .*file"), building(tmp_path / "file"):
        pass
