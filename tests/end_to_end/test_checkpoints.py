"""Runs whose newest checkpoint is damaged: refusal, or an older checkpoint.

The file is its own worker, for a run that cannot write.
"""

import multiprocessing
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import ONE_MICROBATCH, done, refused, run_alone, steps

from megatron_lowbit.storage import files
from tests.hostile_checkpoints import turn_bit

RUN = ("--fp8-recipe", "fp8-delayed", "--save-interval", 2, *ONE_MICROBATCH)
FILES = ("__0_0.distcp", ".metadata", "metadata.json", "lowbit.json")
NEWEST = "iter_0000006"


@pytest.fixture
def whole(memory, pretrain_here, tmp_path_factory) -> Path:
    """Folder of a run of six iterations that keeps two checkpoints."""
    if not memory:
        save = memory["whole"] = tmp_path_factory.mktemp("whole") / "run"
        done(pretrain_here(*RUN, "--train-iters", 6, "--save", save, "--save-keep-last", 2))
    return memory["whole"]


@pytest.fixture
def save(whole, tmp_path) -> Path:
    """Copy of the folder, for damage."""
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def resume(pretrain_here, save):
    """Function that resumes for two more iterations."""
    return lambda *more: pretrain_here(
        *RUN, "--train-iters", 8, "--load", save, "--save", save, *more
    )


def test_classes_that_another_library_took_off_torchs_list(resume):
    """transformers' Trainer removes numpy's, which Megatron-LM had added when it was imported."""
    with torch.serialization.safe_globals([np.ndarray, np.dtype]):
        pass
    done(resume())


def test_a_save_starts_no_process(resume):
    """A process that serves a queue would remain where the run is killed."""
    done(resume())
    assert not [child for child in multiprocessing.active_children() if "Manager" in child.name]


def test_saves_that_reuse_the_plan_of_the_first(whole, pretrain_here, tmp_path):
    """Their .metadata has a class of torch that others do not have."""
    run = (*RUN, "--save", tmp_path, "--load", tmp_path, "--ckpt-assume-constant-structure")
    done(pretrain_here(*run, "--train-iters", 4))
    done(pretrain_here(*run, "--train-iters", 6))
    assert steps(tmp_path) == steps(whole)


def test_a_run_that_saves_less_loads_all(save, resume):
    done(resume("--no-save-optim", "--no-save-rng"))
    assert steps(save).keys() == set(range(1, 9))
    size = {path.name: (path / "__0_0.distcp").stat().st_size for path in save.glob("iter_*")}
    assert size["iter_0000008"] < size[NEWEST] / 2


def damage(file: Path, harm: str) -> None:
    if harm == "removed":
        file.unlink()
    elif harm == "cut":
        # The last character of lowbit.json ends its line.
        file.write_bytes(file.read_bytes()[:-2])
    else:
        turn_bit(file)


def test_the_last_checkpoints_are_kept(whole):
    assert files.complete_iterations(whole) == files.iterations(whole) == [4, 6]


HARMS = [(name, harm) for name in FILES for harm in ("changed", "cut", "removed")]
HARMS.remove(("lowbit.json", "removed"))  # test_without_a_record is about it


@pytest.mark.parametrize(("name", "harm"), HARMS)
def test_a_damaged_file_is_named(whole, save, resume, name, harm):
    file = save / NEWEST / name
    damage(file, harm)
    error = refused(resume())
    assert str(file) in error
    assert "iter_0000004" in error and "--load-latest-valid" in error
    assert steps(save) == steps(whole)


def test_it_goes_back_to_the_newest_valid_one(whole, save, resume):
    shard = save / NEWEST / "__0_0.distcp"
    damage(shard, "changed")
    again = resume("--load-latest-valid")
    done(again)
    assert f"skipped {NEWEST}: {shard}: its content differs" in again.stdout
    made = steps(save)
    assert made.keys() == set(range(1, 9))
    assert {step: made[step] for step in range(1, 7)} == steps(whole)
    # Iterations 6 and 8 are saved again, and on record.
    assert files.complete_iterations(save) == [4, 6, 8]
    done(resume())


def test_without_a_record_it_is_loaded_and_said(save, resume):
    (save / NEWEST / "lowbit.json").unlink()
    result = resume()
    done(result)
    assert f"{save / NEWEST}: no lowbit.json: loaded without comparing" in result.stdout


def test_an_empty_tracker_is_restored(save, resume):
    (save / files.TRACKER).write_text("")
    result = resume()
    done(result)
    assert f"{save / files.TRACKER}: empty" in result.stdout
    assert steps(save).keys() == set(range(1, 9))


@pytest.mark.slow
def test_a_disk_that_is_full_leaves_the_checkpoint_before(save, resume, pretrain_forked):
    """A limit on file size has the same effect: the kernel refuses a write within a file."""
    run = (*RUN, "--train-iters", 8, "--load", save, "--save", save)
    result = pretrain_forked(*run, script=Path(__file__))
    cause = f"{save / 'iter_0000008' / '__0_0.distcp'}: File too large"
    assert result.returncode == 1
    assert result.stderr.endswith(f"error: cannot save the checkpoint: {cause}\n")
    assert files.latest_iteration(save) == 6
    done(resume())
    assert files.latest_iteration(save) == 8


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    run_alone(sys.argv[1:])
