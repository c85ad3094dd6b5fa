"""Runs with BF16 weights on a CPU, and a record of the bytes that they keep and receive."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron.core.distributed import param_and_grad_buffer

from benchmarks.stored_weights import count_received
from megatron_lowbit.arguments import cpu
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.layers.state import layer_states


@contextmanager
def in_bf16() -> Iterator[None]:
    """Leave --bf16 to a run without stored weights, too, which a CPU would ignore."""
    with pytest.MonkeyPatch.context() as patch:
        rows = tuple(row for row in cpu._UNSUPPORTED if row.flag != "--bf16")
        patch.setattr(cpu, "_UNSUPPORTED", rows)
        yield


@contextmanager
def recorded_runs(folder: Path) -> Iterator[None]:
    """Write what each run, in order, receives and keeps to ``folder``/NUMBER.RANK.json.

    ``received``: bytes of parameters from other ranks, a step; ``parameters`` and ``codes``: bytes
    of memory behind the model's parameters, and of its quantized weights, in the backward pass.
    """
    original, number = pretrain.run, 0

    def run(args: Any, hooks: Sequence[Any] = ()) -> None:
        nonlocal number
        found: Counter[str] = Counter()
        with _received(found):
            original(args, [*hooks, partial(_watch, found=found)])
        rank = os.environ.get("RANK", "0")
        (folder / f"{number}.{rank}.json").write_text(json.dumps(found))
        number += 1

    with in_bf16(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "run", run)
        yield


@contextmanager
def _received(found: Counter) -> Iterator[None]:
    """Count broadcasts of stored weights, and Megatron-LM's gathers of parameters."""
    with pytest.MonkeyPatch.context() as patch:  # restores what count_received replaces
        patch.setattr(dist, "broadcast", dist.broadcast)
        gather = param_and_grad_buffer.dist_all_gather_func
        patch.setattr(param_and_grad_buffer, "dist_all_gather_func", gather)
        count_received(found)
        yield


def _watch(chunks: list, found: Counter) -> list:
    """Record the memory of parameters and codes whenever the output layer computes gradients."""

    def note(*_: Any) -> None:
        found["parameters"] = _bytes_behind(p for c in chunks for p in c.parameters())
        found["codes"] = _bytes_behind(_tensors([s.weight_cache for s in layer_states(chunks)]))

    chunks[-1].register_full_backward_pre_hook(note)
    return chunks


def _bytes_behind(tensors: Iterator[torch.Tensor]) -> int:
    """Return the bytes of all memory that tensors are views of, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.size() for storage in storages}.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in dataclasses and sequences."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


def recording(run: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Return a function that makes a run as ``run`` does, in BF16 and recorded."""

    def recorded(*arguments: object) -> dict[str, int]:
        with recorded_runs(folder):
            result = run(*arguments)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads((folder / "0.0.json").read_text())

    return recorded
