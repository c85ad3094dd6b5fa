"""Runs of a few iterations: hooks, results, and parts that would take longer than the runs."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatron_lowbit.megatron import pretrain

# isort: split
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


@contextmanager
def without_pictures() -> Iterator[None]:
    """Skip the picture at the end of a run, inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "_draw_loss", lambda args, metrics: None)
        yield


@contextmanager
def hooked_runs(hook: Callable[[list, Namespace], object]) -> Iterator[None]:
    """Call a function of the model's chunks and the arguments in runs that begin in the context."""
    original = pretrain.run

    def run(args: Namespace, hooks: Sequence = ()) -> None:
        def call(chunks: list) -> list:
            hook(chunks, args)
            return chunks

        original(args, [*hooks, call])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "run", run)
        yield


def metrics(folder: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """Return the training loss by iteration."""
    return {step: loss for step, (loss, _) in steps(folder).items()}


def steps(folder: Path) -> dict[int, tuple[float, float]]:
    """Return (training loss, gradient norm) by iteration, which must be unique."""
    logged = [m for m in metrics(folder) if "lm_loss" in m]
    by_iteration = {m["iteration"]: (m["lm_loss"], m["grad_norm"]) for m in logged}
    assert len(by_iteration) == len(logged)
    return by_iteration


def saved_tensors(checkpoint: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return a checkpoint's whole tensors by key, with NaN where no shard has values."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        key: torch.full(entry.size, torch.nan).to(entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(prefix)
    }
    load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return tensors


@pytest.fixture(scope="session", autouse=True)
def short_runs() -> Iterator[None]:
    """Shorten the runs of this process, in folders whose conftest.py imports this fixture."""
    with without_pictures():
        yield
