"""Loading a checkpoint runs no code that its files hold, whatever the kind of file."""

import io
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gpt import SHAPE, Training, initialize_distributed, parallel_args, shutdown
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_files
from megatron_lowbit.training.checkpoint import load_checkpoint
from megatron_lowbit.training.checkpoint_pickle import Reader

SHARD = "__0_0.distcp"


class Evil:
    """A pickle of it creates a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.file),)


@pytest.fixture(scope="module", autouse=True)
def single_process():
    initialize_distributed(parallel_args())
    yield
    shutdown()


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(distributed_optimizer=False)


@pytest.fixture
def checkpoint(training, tmp_path) -> Path:
    return training.save(tmp_path / "saved", 1)


@pytest.fixture
def trace(tmp_path) -> Path:
    """What a pickle that runs leaves behind."""
    return tmp_path / "trace"


def reseal(checkpoint: Path) -> None:
    """Make the checksums fit the files, as whoever plants a pickle would."""
    document = checkpoint_files.read_document(checkpoint)
    (checkpoint / checkpoint_files.DOCUMENT).unlink()
    document["files"] = checkpoint_files.checksums(checkpoint, 0)
    checkpoint_files.write_document(checkpoint, document)


def plant_in_shard(checkpoint: Path, evil: Evil, tensors: bool) -> None:
    """Append the pickle to the shard, and let the first tensor or object be read from there."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    payload = io.BytesIO()
    torch.save([evil], payload)
    for index, where in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata) == tensors:
            where.offset = (checkpoint / SHARD).stat().st_size
            where.length = len(payload.getvalue())
            break
    with open(checkpoint / SHARD, "ab") as file:
        file.write(payload.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def plant(checkpoint: Path, kind: str, evil: Any) -> Path:
    """Plant a pickle in one kind of file; returns the file."""
    if kind == "metadata":
        (checkpoint / ".metadata").write_bytes(pickle.dumps(evil))
    elif kind == "inside metadata":
        whole = Metadata(state_dict_metadata={}, planner_data=evil)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(whole))
    elif kind == "common":
        torch.save({"iteration": evil}, checkpoint / "common.pt")
    elif kind == "old common":
        torch.save(evil, checkpoint / "common.pt", _use_new_zipfile_serialization=False)
    else:
        plant_in_shard(checkpoint, evil, tensors=kind == "tensor")
        return checkpoint / SHARD
    return checkpoint / ("common.pt" if "common" in kind else ".metadata")


@pytest.mark.parametrize("forced", [False, True], ids=["", "weights_only off"])
@pytest.mark.parametrize("kind", ["metadata", "inside metadata", "common", "old common", "tensor"])
def test_planted_pickle_does_not_run(training, checkpoint, trace, kind, forced, monkeypatch):
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    file = plant(checkpoint, kind, Evil(trace))
    reseal(checkpoint)
    for optimizer, scheduler in (training.optimizer, training.scheduler), (None, None):
        with pytest.raises(UserError) as caught:
            load_checkpoint(checkpoint.parent, training.model, optimizer, scheduler, SHAPE)
        assert str(caught.value).startswith(f"{file}: refused: ")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert not trace.exists()


def test_a_planted_object_is_not_read(training, checkpoint, trace):
    plant(checkpoint, "object", Evil(trace))
    reseal(checkpoint)
    load_checkpoint(
        checkpoint.parent, training.model, training.optimizer, training.scheduler, SHAPE
    )
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["metadata", "inside metadata", "common", "object"])
def test_the_planted_pickle_would_run(checkpoint, trace, kind, monkeypatch):
    """By torch's own readers: the test above is about something."""
    file = plant(checkpoint, kind, Evil(trace))
    if "metadata" in kind:
        with pytest.raises(AttributeError) if kind == "metadata" else nullcontext():
            FileSystemReader(checkpoint).read_metadata()
    elif kind == "common":
        torch.load(file, weights_only=False)
    else:
        data = file.read_bytes()
        start = max(w.offset for w in Reader(checkpoint).read_metadata().storage_data.values())
        torch.load(io.BytesIO(data[start:]), weights_only=False)
    assert trace.is_dir()


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
    with pytest.raises(UserError, match=r"\.metadata: "):
        Reader(tmp_path).read_metadata()


@pytest.mark.parametrize("damage", ["empty", "cut", "no pickle", "other object"])
def test_damaged_metadata(checkpoint, damage):
    file = checkpoint / ".metadata"
    whole = file.read_bytes()
    damages = {"empty": b"", "cut": whole[:1000], "no pickle": b"\xff" * 50, "other object": b"N."}
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


def test_reads_what_torch_reads(checkpoint):
    ours, theirs = (kind(checkpoint).read_metadata() for kind in (Reader, FileSystemReader))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
