"""Errors of a run: a full disk and insufficient memory in one line; agreement of ranks."""

import errno
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_lowbit.errors import TrainingError, UserError, error_behind
from megatron_lowbit.megatron.run.errors import (
    raise_on_all_ranks,
    translate_assertions,
    translate_build_errors,
    translate_machine_limits,
    translate_missing_packages,
    translate_model_errors,
    translate_save_errors,
)
from megatron_lowbit.megatron.run.workarounds import save_without_another_process

ARGS = Namespace(save="runs/mine")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WRITER = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


def failure(error: BaseException) -> CheckpointException:
    return CheckpointException("write", {0: (error, None)})


IO_ERROR = errno.EIO, os.strerror(errno.EIO)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")
LIMITS, SAVES = partial(translate_machine_limits, ARGS), partial(translate_save_errors, "runs")
TRANSLATED = [
    *((LIMITS, full, TrainingError, "^--save runs/mine: cannot be written to")
      for full in (FULL, WRITER, failure(FULL), failure(WRITER))),
    (LIMITS, NO_MEMORY, UserError, "--dry-run"),
    (SAVES, OSError(*IO_ERROR), TrainingError, "runs: Input/output error$"),
    (SAVES, OSError(*IO_ERROR, "runs/mine/.metadata"), TrainingError, "mine/.metadata: Input/out"),
    # As all ranks report a failure of one of them.
    (SAVES, UserError("a: full"), TrainingError, "save the checkpoint: a: full"),
    *((translate_model_errors, error, UserError, "^Megatron-LM cannot build the model: .*Error: ")
      for error in (TypeError("unexpected keyword"), KeyError("a"))),
]  # fmt: skip


@pytest.mark.parametrize(("translate", "error", "kind", "message"), TRANSLATED)
def test_an_error_becomes_one_line(translate, error, kind, message):
    with pytest.raises(kind, match=message) as ended, translate():
        raise error
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize(("free", "expected"), [(2**20, TrainingError), (2**30, RuntimeError)])
def test_a_writers_process_that_fails_on_a_full_disk(monkeypatch, free, expected):
    """Megatron-LM's error says nothing of the disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Namespace(free=free))
    with pytest.raises(expected), translate_machine_limits(ARGS):
        raise RuntimeError("Worker failure: An error is caught while starting worker 0, error: ")


@pytest.mark.parametrize("is_distributed", [True, False])
def test_a_save_that_cannot_write_names_the_file(tmp_path, is_distributed):
    """Also on other ranks, which get Megatron-LM's message alone."""
    save_without_another_process()
    file = tmp_path / "missing" / "__1_0.distcp"
    writer = filesystem_async.FileSystemWriterAsync(tmp_path)
    writer.write_buckets = [(str(file), file.name, ([], []))]
    writer.results_queue = filesystem_async.get_write_results_queue()
    writer.write_preloaded_data_multithread(
        writer.transforms, False, 1, writer.write_buckets, writer.results_queue
    )
    error, _ = writer.retrieve_write_results()
    ended = pytest.raises(TrainingError, match=f"^cannot save the checkpoint: {file}: No such file")
    with ended, translate_save_errors(tmp_path):
        raise failure(error) if is_distributed else error


def test_ctrl_c_during_a_save_stays_ctrl_c(tmp_path):
    """torch's writer in C++ raises an error of its own as it is closed."""

    def chunks() -> Iterator:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise WRITER  # noqa: B904  with its context
        yield

    save_without_another_process()
    writer = filesystem_async.FileSystemWriterAsync(tmp_path)
    bucket = (str(tmp_path / "file"), "file", (chunks(), []))
    with pytest.raises(KeyboardInterrupt):
        writer.write_preloaded_data_multithread(writer.transforms, False, 1, [bucket], None)


def test_memory_that_does_not_suffice():
    refused = pytest.raises(UserError, match=r"does not fit into memory.* 4611686018427387904 b")
    with refused, translate_machine_limits(ARGS):
        torch.empty(2**62, dtype=torch.uint8)


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


def test_local_layers_without_apex():
    """As on a GPU, where Megatron-LM's norm refuses its default and its softmax needs a kernel."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer import torch_norm

    check = next(
        line
        for line in Path(torch_norm.__file__).read_text().splitlines()
        if "persist_" in line and "assert" in line
    )
    norms = pytest.raises(UserError, match=r"Apex, or give --no-persist-layer-norm$")
    with norms, translate_assertions():
        config = Namespace(persist_layer_norm=True)
        exec(compile(check.strip(), torch_norm.__file__, "exec"), {"config": config})
    softmax = pytest.raises(UserError, match=r"Apex, or give --no-masked-softmax-fusion$")
    with softmax, translate_missing_packages():
        FusedScaleMaskSoftmax.get_batch_per_block(1, 1, 1, 1)


@pytest.mark.parametrize("error", [ValueError("no biases"), RuntimeError("upgrade mamba_ssm")])
def test_a_module_that_megatron_lm_refuses_to_build(error):
    class Builder:
        def build_model(self):
            raise error

    upstream = Builder.build_model
    config = SimpleNamespace(get_builder_cls=lambda: Builder)
    with pytest.raises(UserError, match=f"^{error}$"), translate_build_errors(config):
        Builder().build_model()
    assert Builder.build_model is upstream


def test_an_error_of_torch_while_a_model_is_built_is_not_changed():
    class Builder:
        def build_model(self):
            torch.ones(2) @ torch.ones(3)

    config = SimpleNamespace(get_builder_cls=lambda: Builder)
    with pytest.raises(RuntimeError, match="size"), translate_build_errors(config):
        Builder().build_model()


def test_process_groups_that_do_not_fit_the_ranks():
    from megatron.core import parallel_state

    refused = pytest.raises(
        UserError, match=r"parallel_state.py:\d+\): world_size .* not divisible"
    )
    with pytest.MonkeyPatch.context() as patch, refused, translate_assertions():
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: 1)
        patch.setattr(dist, "get_rank", lambda: 0)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(RuntimeError, match="another"), translate_assertions():
        raise RuntimeError("another")


# -- agreement of ranks ----------------------------------------------------------------------------

FOLDER = Path("/somewhere")


@pytest.fixture
def other_rank(monkeypatch):
    """Function that makes this process one of two ranks, given the other's report."""

    def play(report: tuple[bool, str] | None) -> list:
        told = []

        def gather(reports: list, own: object) -> None:
            told.append(own)
            reports[:] = [own, report]

        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_gather_object", gather)
        return told

    return play


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (UserError("x: damaged"), (True, "x: damaged")),
        (OSError(28, "No space left on device"), (True, "cannot read /somewhere: No space left")),
        (OSError(30, "Read-only file system", "/a/b"), (True, "/a/b: Read-only file system")),
        (OSError("odd"), (True, "cannot read /somewhere: odd")),
        (CheckpointException("many", {1: (UserError("x: damaged"), None)}), (True, "x: damaged")),
    ],
)
def test_bad_input_here_is_the_same_line_everywhere(other_rank, error, report):
    told = other_rank(None)
    with pytest.raises(UserError) as caught, raise_on_all_ranks("read", FOLDER):
        raise error
    ((is_user_error, message),) = told
    assert is_user_error is report[0] and message.startswith(report[1])
    assert str(caught.value) == message and "\n" not in message


@pytest.mark.parametrize("error", [None, KeyError("follows from it")])
def test_bad_input_elsewhere_explains_an_error_here(other_rank, error):
    other_rank((True, "y: damaged"))
    refused = pytest.raises(UserError, match=r"^y: damaged$")
    with refused as caught, raise_on_all_ranks("read", FOLDER):
        if error:
            raise error
    assert caught.value.__cause__ is error


def test_another_error_here_is_raised_as_it_is(other_rank):
    told = other_rank(None)
    with pytest.raises(KeyError), raise_on_all_ranks("read", FOLDER):
        raise KeyError("a bug")
    assert told == [(False, "KeyError('a bug')")]


def test_another_error_elsewhere(other_rank):
    other_rank((False, "KeyError('a bug')"))
    failure = r"another rank failed: KeyError\('a bug'\)"
    with pytest.raises(RuntimeError, match=failure), raise_on_all_ranks("read", FOLDER):
        pass


def test_the_cause_of_an_error_is_found():
    mistake = UserError("x")
    middle = RuntimeError("y")
    middle.__cause__ = mistake
    outer = CheckpointException("z", {0: (middle, None)})
    assert error_behind(mistake, UserError) is mistake
    assert error_behind(outer, UserError) is mistake
    assert error_behind(outer, OSError) is None


@pytest.mark.usefixtures("single_process")
def test_a_real_group_of_one():
    with raise_on_all_ranks("read", FOLDER):
        pass
    with pytest.raises(UserError, match=r"^x$"), raise_on_all_ranks("read", FOLDER):
        raise UserError("x")
