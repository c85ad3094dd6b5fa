"""Reading a checkpoint runs no code that its files hold, whatever the kind of file."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run.common_state import read_common_state, read_object
from megatron_lowbit.storage.pickles import Reader, check_lengths, read_objects, saved_tensors
from tests.hostile_checkpoints import COMMON, Evil, write_metadata, write_object

SHARD = "__0_0.distcp"
EXTRA = "model.extra/shard_0_1"


@pytest.fixture
def checkpoint(write_checkpoint, tmp_path) -> Path:
    return write_checkpoint(tmp_path / "iter_0000007")


@pytest.fixture
def trace(tmp_path) -> Path:
    """Trace that a pickle leaves behind when it runs."""
    return tmp_path / "trace"


def plant(checkpoint: Path, kind: str, evil: Evil) -> Path:
    """Plant a pickle in one kind of file; return the file."""
    if kind == "metadata":
        write_metadata(checkpoint, evil)
    elif kind == "inside metadata":
        write_metadata(checkpoint, Metadata(state_dict_metadata={}, planner_data=evil))
    elif kind == "common":
        torch.save({"iteration": evil}, checkpoint / "common.pt")
    elif kind == "old common":
        torch.save(evil, checkpoint / "common.pt", _use_new_zipfile_serialization=False)
    else:
        return write_object(checkpoint, [evil], kind)
    return checkpoint / ("common.pt" if "common" in kind else ".metadata")


PLANTED = ["metadata", "inside metadata", "common", "old common", EXTRA, COMMON]


@pytest.fixture(params=[False, True], ids=["", "weights_only off"])
def forced(request, monkeypatch):
    if request.param:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


def check_objects(path: Path) -> None:
    list(read_objects(path))


BUILDS = {
    "_StorageInfo.__init__": b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"
    b"N}X\x08\0\0\0__init__ctorch\nSize\ns\x86b0",
    "WriteItemType.SHARD._value_": b"ctorch.distributed.checkpoint.planner\nWriteItemType\n"
    b"K\x02\x85R}X\x07\0\0\0_value_Kcsb0",
}
"""Pickles of BUILD, which sets attributes of whatever is on the stack."""


@pytest.mark.parametrize("name", BUILDS)
def test_a_pickle_that_changes_a_class_is_refused_and_changes_none(checkpoint, name):
    file = checkpoint / ".metadata"
    content, constructor = file.read_bytes(), _StorageInfo.__init__
    file.write_bytes(content[:2] + BUILDS[name] + content[2:])
    with pytest.raises(UserError, match=f"refused: .*it sets {re.escape(name)}"):
        check_lengths(checkpoint)
    assert _StorageInfo.__init__ is constructor
    assert WriteItemType.SHARD.value == 2


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_pickle_is_refused_and_does_not_run(checkpoint, trace, kind):
    file = plant(checkpoint, kind, Evil(trace))
    readers = [check_objects]
    if kind != EXTRA:
        readers.append(read_common_state)
    if "metadata" in kind:
        readers += [check_lengths, saved_tensors]
    if "metadata" in kind or "common" not in kind:
        readers.append(lambda path: read_object(path, kind))
    for read in readers:
        if read is read_common_state and "metadata" in kind:
            (checkpoint / "common.pt").unlink(missing_ok=True)
        with pytest.raises(UserError) as caught:
            read(checkpoint)
        assert str(caught.value).startswith(f"{file}: refused: ")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        assert not trace.exists()


@pytest.mark.usefixtures("forced")
def test_a_pickle_in_a_tensors_place_does_not_run(checkpoint, trace):
    plant(checkpoint, "model.weight", Evil(trace))
    places = Reader(checkpoint).read_metadata().storage_data
    (place,) = (place for index, place in places.items() if index.fqn == "model.weight")
    with pytest.raises(UserError, match=rf"{SHARD}: refused: "):
        Reader(checkpoint).read_tensor(place)
    assert not trace.exists()


@pytest.mark.parametrize(
    "reach",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"cpathlib\nPath\n.",
        # Protocol 4 resolves dots: from a known class to whatever its module imported.
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x94\x8c\x09os.system\x94\x93.",
    ],
)
def test_names_outside_the_list_are_refused(tmp_path, reach):
    (tmp_path / ".metadata").write_bytes(reach)
    with pytest.raises(UserError, match=r"\.metadata: refused: "):
        Reader(tmp_path).read_metadata()


@pytest.mark.parametrize("damage", ["empty", "cut", "no pickle", "other object"])
def test_damaged_metadata(checkpoint, damage):
    file = checkpoint / ".metadata"
    whole = file.read_bytes()
    damages = {"empty": b"", "cut": whole[:500], "no pickle": b"\xff" * 50, "other object": b"N."}
    file.write_bytes(damages[damage])
    with pytest.raises(UserError, match=r"\.metadata: (damaged|refused|holds NoneType)"):
        Reader(checkpoint).read_metadata()


def test_metadata_changes_nothing_outside_the_checkpoint(checkpoint):
    """A pickle may set attributes of the classes it names: pathlib's must not be among them."""
    poison = b"cpathlib\nPosixPath\n(N}S'exists'\nI1\nstb."
    (checkpoint / ".metadata").write_bytes(poison)
    with pytest.raises(UserError):
        Reader(checkpoint).read_metadata()
    assert (checkpoint / ".metadata").exists() is True
    assert Path.exists is not True


def test_the_reader_reads_what_torchs_reads(checkpoint):
    ours, theirs = (kind(checkpoint).read_metadata() for kind in (Reader, FileSystemReader))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    for index, place in ours.storage_data.items():
        if isinstance(ours.state_dict_metadata[index.fqn], TensorStorageMetadata):
            expected = torch.arange(12.0).view(3, 4)
            assert torch.equal(Reader(checkpoint).read_tensor(place), expected)


# -- a good checkpoint, and a damaged one ----------------------------------------------------------


def test_a_good_checkpoint(checkpoint):
    check_lengths(checkpoint)
    check_objects(checkpoint)
    assert saved_tensors(checkpoint) == {"model.weight": (3, 4)}
    common = read_common_state(checkpoint)
    assert common["iteration"] == 7 and common["args"].lr == 1.0


def test_the_common_state_of_older_checkpoints(checkpoint):
    torch.save({"iteration": 8}, checkpoint / "common.pt")
    check_objects(checkpoint)
    assert read_common_state(checkpoint) == {"iteration": 8}


@pytest.mark.parametrize("content", [[], [{}, {}], [1], {"iteration": 7}])
def test_a_common_state_of_another_shape(checkpoint, content, monkeypatch):
    name = "megatron_lowbit.megatron.run.common_state.read_object"
    monkeypatch.setattr(name, lambda path, key: content)
    with pytest.raises(UserError, match="its common state is damaged"):
        read_common_state(checkpoint)


def test_an_object_that_is_not_there(checkpoint):
    with pytest.raises(UserError, match=r"no object model\.nothing"):
        read_object(checkpoint, "model.nothing")


def test_other_formats_hold_no_sharded_tensors(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    torch.save({}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    assert saved_tensors(tmp_path) == {}
    check_lengths(tmp_path)
    check_objects(tmp_path)


def test_files_missing_and_cut_short(checkpoint):
    shard, metadata = checkpoint / SHARD, checkpoint / ".metadata"
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    with pytest.raises(UserError, match=f"{shard}: {size - 1} bytes instead of {size}$"):
        check_lengths(checkpoint)
    os.truncate(shard, size // 3)
    with pytest.raises(UserError, match=f"{shard}: {size // 3} bytes instead of"):
        check_objects(checkpoint)
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard}: missing$"):
        check_lengths(checkpoint)
    metadata.unlink()
    with pytest.raises(UserError, match=f"{metadata}: missing$"):
        check_lengths(checkpoint)
