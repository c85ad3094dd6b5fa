"""A full disk and insufficient memory end a run in one line."""

import errno
import os
from argparse import Namespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.megatron.run.errors import (
    translate_assertions,
    translate_machine_limits,
    translate_missing_packages,
    translate_model_errors,
)

ARGS = Namespace(save="runs/mine")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WRITER = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


def failure(error: BaseException) -> CheckpointException:
    return CheckpointException("write", {0: (error, None)})


@pytest.mark.parametrize("error", [FULL, WRITER, failure(FULL), failure(WRITER)])
def test_a_disk_that_fills_up(error):
    with (
        pytest.raises(TrainingError, match=r"^--save runs/mine: cannot be written to"),
        translate_machine_limits(ARGS),
    ):
        raise error


def test_memory_that_does_not_suffice():
    refused = pytest.raises(UserError, match=r"does not fit into memory.* 4611686018427387904 b")
    with refused, translate_machine_limits(ARGS):
        torch.empty(2**62, dtype=torch.uint8)
    with pytest.raises(UserError, match="--dry-run"), translate_machine_limits(ARGS):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")


@pytest.mark.parametrize("error", [KeyError("a"), FileNotFoundError(2, "none"), UserError("b")])
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as raised, translate_machine_limits(ARGS):
        raise error
    assert raised.value is error


def test_a_missing_package_is_named():
    """As Megatron-LM raises it for --optimizer muon and --log-device-memory-used."""
    refused = pytest.raises(UserError, match=r"^a package is missing: .*'none_such'")
    with refused, translate_missing_packages():
        import none_such  # noqa: F401


@pytest.mark.parametrize("error", [TypeError("unexpected keyword"), KeyError("a")])
def test_a_model_that_cannot_be_built(error):
    refused = pytest.raises(UserError, match=r"^Megatron-LM cannot build the model: .*Error: ")
    with refused, translate_model_errors():
        raise error


def test_process_groups_that_do_not_fit_the_ranks():
    from megatron.core import parallel_state

    refused = pytest.raises(
        UserError, match=r"parallel_state.py:\d+\): world_size .* not divisible"
    )
    with pytest.MonkeyPatch.context() as patch, refused, translate_assertions():
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 1)
        patch.setattr(torch.distributed, "get_rank", lambda: 0)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(RuntimeError, match="another"), translate_assertions():
        raise RuntimeError("another")
