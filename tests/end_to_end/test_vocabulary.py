"""A checkpoint in a layout whose vocabulary is padded to another size, and back, to the bit."""

import shutil
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import load_tensors_metadata
from tiny_run import done, start_from
from torch.distributed.checkpoint import FileSystemReader, load

VOCABULARY = 512
# Padded to 560 on one rank, 640 on two.
MODEL = ("--num-layers", 1, "--make-vocab-size-divisible-by", 80, "--train-iters", 2)
SPLIT = ("--tensor-model-parallel-size", 2)
OPTIMIZERS = {"plain": (), "distributed": ("--use-distributed-optimizer",)}


@pytest.fixture
def saved(memory, pretrain_here, pretrain_ranks, tmp_path) -> Path:
    """Folders ``OPTIMIZER one``, ``two`` and ``back``: one checkpoint, saved, loaded and saved."""
    if memory:
        return memory["folder"]
    jobs = {}
    for name, optimizer in OPTIMIZERS.items():
        done(pretrain_here(*MODEL, *optimizer, "--save", tmp_path / f"{name} one"))
        two = continued(tmp_path / f"{name} one", tmp_path / f"{name} two")
        jobs[name] = (*MODEL, *optimizer, *SPLIT, "--load", two, "--save", two)
    pretrain_ranks(jobs)
    for name, optimizer in OPTIMIZERS.items():
        back = continued(tmp_path / f"{name} two", tmp_path / f"{name} back")
        done(pretrain_here(*MODEL, *optimizer, "--load", back, "--save", back))
    memory["folder"] = tmp_path
    return tmp_path


def continued(source: Path, folder: Path) -> Path:
    """A copy of a run, to be loaded and saved again without an iteration."""
    start_from(source, 2, folder)
    shutil.copy(source / "metrics.jsonl", folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of iteration 2."""
    checkpoint = folder / "iter_0000002"
    stored = load_tensors_metadata(str(checkpoint))
    values = {key: torch.zeros(tensor.global_shape) for key, tensor in stored.items()}
    load(values, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return values


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_padding_may_differ(saved, name):
    one, two, back = (tensors(saved / f"{name} {run}") for run in ("one", "two", "back"))
    assert one.keys() == two.keys() == back.keys()
    padded = 0
    for key, tensor in one.items():
        if not ("word_embeddings" in key or "output_layer" in key):
            assert torch.equal(tensor, two[key])
            assert torch.equal(tensor, back[key])
            continue
        padded += 1
        assert (len(tensor), len(two[key]), len(back[key])) == (560, 640, 560)
        for other in (two[key], back[key]):
            assert torch.equal(other[:VOCABULARY], tensor[:VOCABULARY])
        assert not two[key][560:].any()
    # Two matrices, each with two moments; the distributed optimizer keeps FP32 copies too.
    assert padded == {"plain": 6, "distributed": 8}[name]
