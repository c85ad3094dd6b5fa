"""Whatever a checkpoint holds, commands and training end in a result or in one line."""

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, save
from training_runs import MODEL, train

from megatron_lowbit.checkpoints.command import main as checkpoint_main
from megatron_lowbit.checkpoints.model_arguments import saved_arguments
from megatron_lowbit.conversion.command import main as convert_main
from megatron_lowbit.errors import UserError
from megatron_lowbit.storage import files
from megatron_lowbit.storage.pickles import read_objects
from tests.hostile_checkpoints import COMMON, NAMES, copy_of, mutate
from tests.marks import others_slow

SMALL = [*MODEL, "--num-layers", 1]


def one_line(read: Callable[[], object], capsys) -> str:
    """Return the error of a command that may refuse its checkpoint, or nothing; check the lines."""
    try:
        read()
        error = ""
    except UserError as refused:
        error = str(refused)
    printed = capsys.readouterr()
    assert "\n" not in error and len(error) < 2000
    assert "\x1b" not in error + printed.out + printed.err
    return error


# -- mutations by name -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A checkpoint in which each value is there that mutations change, with one tensor."""
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    common = {
        "args": Namespace(**vars(saved_arguments(dict.fromkeys(("num_attention_heads",
                          "num_query_groups", "vocab_size"), 2))), consumed_train_samples=4),
        "iteration": 2, "checkpoint_version": 3.0, "num_floating_point_operations_so_far": 1.0,
        "content_metadata": {}, "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 4},
        "optimizer": {"param_groups": [group, dict(group)]},
    }  # fmt: skip
    directory = tmp_path_factory.mktemp("tiny")
    path = files.iteration_directory(directory, 2)
    state = {
        "model.weight": torch.zeros(3, 4),
        "rng_state/shard_0_1": [{"state": 1}],
        COMMON: [common],
    }
    save(state, checkpoint_id=path, planner=DefaultSavePlanner(False), no_dist=True)
    (path / files.CONFIG).write_text('{"sharded_backend": "torch_dist"}')
    files.write_tracker(directory, 2)
    return directory


UNUSED = {
    *(f"common: {name}" for name in (
        "args Namespace()", "scheduler {}", "optimizer {}", "optimizer []", "groups []",
        "groups [{}]", "group max_lr None", "no iteration", "no scheduler", "no optimizer",
        "rng_state 'x'", "position []", "recipe 5", "layers 'x'", "averaged 5",
        "factor nan", "long activation",
    )),
    *(f"metadata: {name}" for name in (
        "transforms", "planner_data 'x'", "chunks twice", "dtype torch.bits8",
        # They show only where a tensor is larger than the head of its file.
        "dtype torch.complex128", "sizes (1099511627776, 1099511627776)",
    )),
}  # fmt: skip
"""Mutations that only some readers notice, of which training has each below."""


@pytest.mark.parametrize("name", NAMES)
def test_other_values_are_refused_by_what_all_readers_share(tiny, tmp_path, capsys, name):
    path = copy_of(tiny, tmp_path / "hostile")
    mutate(path, name)

    def read() -> None:
        files.check_lengths(path)
        list(read_objects(path))

    error = one_line(read, capsys)
    assert bool(error) == (name not in UNUSED), error
    if error:
        assert error.startswith(str(path))
        error = one_line(lambda: checkpoint_main(["inspect", str(path.parent)]), capsys)
        assert error.startswith(str(path))


# -- in training and in commands -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "saved"
    train(*SMALL, "--train-iters", 2, "--save", folder)
    return folder


def goes_on(folder: Path) -> None:
    train(*SMALL, "--train-iters", 4, "--load", folder, "--override-opt-param-scheduler")


PASSES = {
    f"{document}: {name}"
    for document, names in {
        "common": ("recipe 5", "averaged 5", "group max_lr None"),
        "metadata": ("planner_data 'x'", "chunks twice", "dtype torch.bits8"),
    }.items()
    for name in names
}
"""Mutations of values that training does not read, or that its schedule sets."""
FIRST = (
    "common: args Namespace()", "common: no iteration", "common: scheduler {}",
    "common: rng_state 'x'", "common: groups []", "metadata: transforms", "common: recipe 5",
)  # fmt: skip


@pytest.mark.parametrize("name", others_slow(NAMES, FIRST))
def test_training_goes_on_or_is_refused(trained, tmp_path, capsys, name):
    mutate(copy_of(trained, tmp_path / "hostile"), name)
    error = one_line(lambda: goes_on(tmp_path / "hostile"), capsys)
    assert bool(error) == (name not in PASSES), error


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda folder, _: checkpoint_main(["inspect", str(folder)]),
    "json": lambda folder, _: checkpoint_main(["inspect", "--json", str(folder)]),
    "verify": lambda folder, _: checkpoint_main(["verify", str(folder)]),
    "average": lambda folder, output: checkpoint_main(
        ["average", str(folder), str(output), "--last", "1"]
    ),
    "convert": lambda folder, output: convert_main(["to-hugging-face", str(folder), str(output)]),
}
READABLE = ("common: recipe 5", "common: position []", "metadata: dtype torch.bits8")


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", others_slow(NAMES, READABLE))
def test_commands_end_in_a_result_or_one_line(trained, tmp_path, capsys, name, recorded):
    """An attacker would also record the checksums."""
    path = copy_of(trained, tmp_path / "hostile")
    mutate(path, name)
    if recorded:
        files.write_document(path, {"files": files.checksums(path)})
    for start in COMMANDS.values():
        one_line(lambda start=start: start(path.parent, tmp_path / "output"), capsys)
        shutil.rmtree(tmp_path / "output", ignore_errors=True)


@contextmanager
def ignored(exception: type[Exception], text: str) -> Iterator[None]:
    """Ignore an exception whose message has this text."""
    try:
        yield
    except exception as error:
        assert text in str(error)


# -- mutations by a seed ---------------------------------------------------------------------------

BLOCK = 10
"""Checkpoints of a test."""


@pytest.mark.parametrize("block", others_slow(range(30), [0]))
def test_fuzzed_checkpoints_end_in_a_result_or_one_line(trained, tmp_path, capsys, block):
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        folder = tmp_path / str(seed)
        mutate(copy_of(trained, folder), f"seed: {seed}")
        for start in COMMANDS.values():
            one_line(lambda start=start: start(folder, tmp_path / "output"), capsys)  # noqa: B023
            shutil.rmtree(tmp_path / "output", ignore_errors=True)
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_training_on_fuzzed_checkpoints_goes_on_or_ends_in_one_line(
    trained, tmp_path, capsys, seed
):
    """Weights that are not finite end a run as they do without a checkpoint."""
    mutate(copy_of(trained, tmp_path / "hostile"), f"seed: {seed}")
    with ignored(RuntimeError, "Unexpected result"):
        one_line(lambda: goes_on(tmp_path / "hostile"), capsys)


# -- folders ---------------------------------------------------------------------------------------


def test_metadata_in_a_folder_of_checkpoints_is_not_taken_for_one(tiny, tmp_path, capsys):
    folder = shutil.copytree(tiny, tmp_path / "runs")
    shutil.copy(folder / "iter_0000002" / ".metadata", folder)
    checkpoint_main(["inspect", str(folder)])
    assert f"{folder / 'iter_0000002'}: iteration 2" in capsys.readouterr().out
    (folder / files.TRACKER).unlink()
    error = one_line(lambda: checkpoint_main(["inspect", str(folder)]), capsys)
    assert error == f"{folder}: name one of its iterations: iter_0000002"
