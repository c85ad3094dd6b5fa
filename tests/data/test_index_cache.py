"""The folder of cached sample indices: its name, its lock, and what a killed run leaves in it."""

import fcntl
import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_lowbit.data.index_cache import building, cache_folder, is_blend_index
from megatron_lowbit.errors import UserError


def test_the_cache_is_in_the_folder_of_the_first_dataset(prefix, write_dataset, tmp_path):
    other = write_dataset(tmp_path / "other", (25,) * 3)
    folder = Path(cache_folder([prefix, other]))
    assert folder.is_dir() and folder.parent == tmp_path / "cache"
    assert cache_folder([prefix, other]) == str(folder) != cache_folder([prefix])


def test_new_data_under_an_old_name_has_another_cache(prefix, write_dataset, tmp_path):
    """In an explicit folder as well."""
    root = tmp_path / "root"
    before, explicit = cache_folder([prefix]), Path(cache_folder([prefix], str(root)))
    assert explicit.parent == root and explicit.name == Path(before).name
    write_dataset(prefix, (50,) * 20)
    assert cache_folder([prefix]) != before
    assert Path(cache_folder([prefix], str(root))).name != explicit.name


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


NAMES = ("document_index", "sample_index", "shuffle_index")


def build(prefix: str, folder: Path, samples: int = 60, split: str = "50,50") -> GPTDataset:
    """Build the training part's index as Megatron-LM does."""
    tokenizer = SimpleNamespace(unique_identifiers={}, eod=0, pad=-1, vocab_size=1000)
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=8, split=split, path_to_cache=str(folder),
        blend=([prefix], None), tokenizer=tokenizer, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    data = IndexedDataset(prefix)
    part = np.arange(round(config.split_matrix[0][1] * len(data)), dtype=np.int32)
    return GPTDataset(data, prefix, part, samples, Split.train, config)


@pytest.fixture
def built(prefix, tmp_path) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with the index of ``prefix``, and its arrays."""
    folder = tmp_path / "indices"
    with building(folder, [prefix]):
        build(prefix, folder)
    return folder, {name: np.load(path_of(folder, name)) for name in NAMES}


def path_of(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"*-{name}.*")
    return path


def damaged(array: np.ndarray, damage: str) -> np.ndarray:
    if damage == "a bit":
        array = array.copy()
        array.view(np.uint8).reshape(-1)[array.nbytes // 2] ^= 4
        return array
    return {
        "zeros": np.zeros_like(array), "floats": array.astype(np.float64),
        "far": array + np.array(10**6, array.dtype), "negative": array.astype(np.int64) - 1,
        "shorter": array[:-1], "flat": array.reshape(-1)[:-1],
        "two epochs": np.concatenate([array, array]),
        "objects": np.array([{}], object),
    }[damage]  # fmt: skip


DAMAGES = ("a bit", "zeros", "floats", "far", "negative", "shorter", "objects")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_index_is_built_again(prefix, built, name, damage, capsys):
    folder, arrays = built
    np.save(path_of(folder, name), damaged(arrays[name], damage), allow_pickle=True)
    with building(folder, [prefix]):
        assert [path.name for path in folder.iterdir()] == [".lock"]
        build(prefix, folder)
    assert "the cached index is wrong or not whole; built again" in capsys.readouterr().out
    for other, array in arrays.items():
        assert np.array_equal(np.load(path_of(folder, other)), array)


@pytest.mark.parametrize("name", [*NAMES, "description"])
def test_a_file_cut_short_is_built_again(prefix, built, name):
    folder, _ = built
    path = path_of(folder, name)
    content = path.read_bytes()
    for cut in (len(content) - 1, 64, 0):
        path.write_bytes(content[:cut])
        with building(folder, [prefix]):
            assert not path.exists()
            build(prefix, folder)
        assert path.read_bytes() == content


@pytest.mark.parametrize("samples", [1, 7, 60, 400])
@pytest.mark.parametrize("split", ["100,0,0", "99,1", "3,97"])
def test_a_right_index_is_kept(prefix, tmp_path, split, samples):
    folder = tmp_path / "indices"
    with building(folder, [prefix]):
        build(prefix, folder, samples, split)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    for prefixes in ([prefix], [], ["another", prefix]):
        with building(folder, prefixes):
            assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_files_of_others_stay(prefix, built):
    folder, _ = built
    (folder / "embeddings.npy").write_bytes(b"no array")
    np.save(folder / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (folder / f"{'0' * 32}-GPTDataset-train-notes.npy").write_text("notes")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with building(folder, [prefix]):
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_index_appears_whole(tmp_path, monkeypatch):
    """Before its name is there, its content is on the disk."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(sorted(os.listdir(tmp_path))))
    with building(tmp_path):
        np.save(f"{tmp_path}/a.npy", np.arange(9))
    assert synced == [[".a.npy.partial", ".lock"], [".lock", "a.npy"]]
    assert np.load(tmp_path / "a.npy").tolist() == list(range(9))
    np.save(tmp_path / "b.npy", np.arange(9))
    assert len(synced) == 2


def test_blends_are_checked():
    datasets, samples = np.zeros(40, np.int16), np.zeros(40, np.int64)
    helpers.build_blending_indices(datasets, samples, np.array([0.75, 0.25]), 2, 40, False)
    assert is_blend_index(datasets, samples, 2)
    for array in (datasets, samples):
        array[20] ^= 1
        assert not is_blend_index(datasets, samples, 2)
        array[20] ^= 1
    assert not is_blend_index(np.zeros(40, np.int16), samples, 2)
    assert not is_blend_index(datasets + np.int16(1), samples, 2)


def test_folders_that_are_links_are_refused(prefix, tmp_path):
    folder = Path(cache_folder([prefix]))
    folder.rmdir()
    (tmp_path / "victim").mkdir()
    folder.symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=f"{folder}: a link is not followed; give --data-cache"):
        cache_folder([prefix])
    folder.unlink()
    folder.parent.rmdir()
    folder.parent.symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=f"{folder.parent}: a link is not followed"):
        cache_folder([prefix])


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
