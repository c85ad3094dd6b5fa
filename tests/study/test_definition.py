"""Arguments that a study, one of its runs, or the command line gives."""

import errno
import json
from pathlib import Path

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.storage.files import TRACKER
from megatron_lowbit.study.command import main
from megatron_lowbit.study.definition import (
    Branch,
    Start,
    Study,
    has_saved,
    is_finished,
    jobs_of,
    mark,
    read_study,
    study_of,
)


@pytest.mark.parametrize(
    "words",
    ["--save x", "--save=x", "--seed 3", "--finetune", "--ckpt-step 3", "--no-load-optim",
     "--no-load-rng"],
)  # fmt: skip
def test_arguments_that_a_study_sets_are_refused(study, tmp_path, words):
    file, flag = study(base="--scale 2"), words.replace("=", " ").split()[0]
    Path(tmp_path / "more.args").write_text(words)
    for more in (words.split(), [f"@{tmp_path}/more.args"]):
        with pytest.raises(UserError, match=f"^run 'base': {flag}: .*; (omit|give) "):
            main(["run", str(file), "--output", str(tmp_path / "out"), "--", *more])
    assert not (tmp_path / "out").exists()


def test_branches_without_save_interval_are_refused_before_their_trunk_trains(tmp_path):
    branches = {"base": Branch(iteration=20, runs={"late": ""})}
    study = Study(arguments="", seeds=[1], runs={"base": ""}, branches=branches)
    with pytest.raises(UserError, match="run 'late': lowbit-pretrain needs --save-interval"):
        jobs_of(study, tmp_path, [])
    trunk, late = jobs_of(study, tmp_path, ["--save-interval", "40"])
    # The argument that is given last counts: the trunk saves where the branch begins.
    assert trunk.command[-6:-2] == ["--save-interval", "40", "--save-interval", "20"]
    assert late.command[-4:-2] == ["--save-interval", "40"]


def test_a_digest_that_an_earlier_version_did_not_record(tmp_path):
    """Nor is there one of a tokenizer on the Hugging Face Hub."""
    (tmp_path / "tokenizer.json").write_text("1")
    words = f"--tokenizer-model {tmp_path}", "--tokenizer-model=openai-community/gpt2"
    study = Study(arguments="", seeds=[1], runs=dict(zip("ab", words, strict=True)))
    local, hub = jobs_of(study, tmp_path / "out", [])
    for job, names in ((local, [str(tmp_path)]), (hub, [])):
        mark(job, finished=False)
        file = job.folder / "study.json"
        state = json.loads(file.read_text())
        assert list(state["inputs"]) == names
        file.write_text(json.dumps({**state, "inputs": {}, "finished": True}))
        assert is_finished(job)


def test_a_full_disk_is_reported_with_the_file(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    job = jobs_of(study_of(["bf16", "nvfp4"], [1]), tmp_path, [])[0]
    with pytest.raises(UserError, match=r"--output .*bf16-1/study.json: cannot be written \(No sp"):
        mark(job, finished=False)


@pytest.mark.parametrize("flag", ["--save-keep-last", "--save-retain-interval"])
def test_a_trunk_keeps_the_checkpoint_of_its_branches(study, tmp_path, flag):
    file = study(base="--scale 2", branch="branches: {base: {iteration: 20, runs: {late: ''}}}")
    with pytest.raises(UserError, match=f"run 'base': {flag}: would delete the checkpoint"):
        jobs_of(read_study(file), tmp_path, [flag, "40"])


@pytest.mark.parametrize("words", ["--scale 2", "--scale=2", "@more.args"])
def test_an_argument_of_a_run_is_not_replaced_for_all_runs(study, tmp_path, monkeypatch, words):
    """Runs would be equal in what they are to differ in."""
    monkeypatch.chdir(tmp_path)
    Path("more.args").write_text("--more 1 --scale 2")
    branch = "branches: {base: {iteration: 40, runs: {branch: --other 1}}}"
    studied = read_study(study(base="''", other="--scale 3", branch=branch))
    with pytest.raises(UserError, match="run 'other': --scale: is given after --, too"):
        jobs_of(studied, tmp_path, words.split())
    with pytest.raises(UserError, match="run 'branch': --other: is given after --, too"):
        jobs_of(studied, tmp_path, ["--other", "2"])
    jobs_of(studied, tmp_path, ["--more", "1"])


def test_a_recipe_of_a_run_is_not_replaced_for_all_runs(tmp_path):
    """Changes of its fields add up."""
    recipes = study_of(["bf16", "nvfp4"], [1])
    with pytest.raises(UserError, match="run 'bf16': --precision-recipe: is given after --, too"):
        jobs_of(recipes, tmp_path, ["--precision-recipe", "mxfp8"])
    changed = recipes.model_copy(update={"runs": {"nvfp4": "--recipe-set grad.rounding=nearest"}})
    jobs_of(changed, tmp_path, ["--recipe-set", "bf16_blocks=none"])


@pytest.mark.parametrize("seeds", ["['1']", "[true]", "[3.0]", "[0]", "[-1]", "[4294967295]"])
def test_seeds_that_training_refuses(tmp_path, seeds):
    file = tmp_path / "study.yaml"
    file.write_text(f"arguments: ''\nseeds: {seeds}\nruns: {{a: '', b: ''}}\n")
    with pytest.raises(UserError, match="seeds"):
        jobs_of(read_study(file), tmp_path, [])


@pytest.mark.parametrize(("trunk", "own", "last"), [(500, 1000, 500), (1000, 600, 599)])
def test_a_branch_after_the_end_of_its_trunk_or_of_itself(tmp_path, trunk, own, last):
    file = tmp_path / "study.yaml"
    for iteration in (last, last + 1):
        file.write_text(
            f"arguments: --save-interval 1\nseeds: [1]\nruns: {{trunk: --train-iters {trunk}}}\n"
            f"branches: {{trunk: {{iteration: {iteration}, runs: "
            f"{{late: --train-iters {own}}}}}}}\n"
        )
        if iteration == last:
            jobs_of(read_study(file), tmp_path, [])
    with pytest.raises(UserError, match=f"'late': begins at iteration {last + 1}; .* {last} or "):
        jobs_of(read_study(file), tmp_path, [])


def test_a_trunk_has_saved_once_its_tracker_file_says_so(tmp_path):
    """Megatron-LM empties the file before it writes it."""
    start = Start(tmp_path, 20)
    (tmp_path / "iter_0000020").mkdir()
    assert not has_saved(start)
    for text, saved in (("10", False), ("", False), ("20", True), ("", False), ("30", True)):
        (tmp_path / TRACKER).write_text(text)
        assert has_saved(start) == saved
    (tmp_path / "iter_0000020").rmdir()
    with pytest.raises(UserError, match="iter_0000020: is missing"):
        has_saved(start)
