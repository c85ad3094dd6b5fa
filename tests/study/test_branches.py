"""Runs of a study that begin from the checkpoint of another, their trunk."""

import json
from pathlib import Path

import pytest

from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.storage import files
from megatron_lowbit.study.command import main
from megatron_lowbit.study.definition import jobs_of, read_study, with_recipes
from tests.short_runs import metrics

BRANCH = "branches: {base: {iteration: 30, runs: {changed: --scale 2.2}}}"


def stop(folder: Path, iteration: int) -> None:
    """Change a finished run to one that has stopped with the checkpoint of an iteration."""
    state = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**state, "finished": False}))
    (folder / files.TRACKER).write_text(str(iteration))


def test_runs_that_begin_from_anothers_checkpoint(study, tmp_path, capsys):
    """After the trunk of their seed, which saves there and keeps its checkpoints until then."""
    file, output = study(base="--scale 2", branch=BRANCH), tmp_path / "out"
    main(["run", str(file), "--output", str(output), "--at-once", "3"])
    for seed in (1, 2):
        command = json.loads((output / f"base-{seed}" / "study.json").read_text())["command"]
        assert command[-4:] == ["--save-interval", "30", "--seed", str(seed)]
        changed = metrics(output / f"changed-{seed}")
        assert [line["iteration"] for line in changed] == list(range(31, 41))
        assert not list(output.glob("*/iter_*"))
    shown = capsys.readouterr().out
    assert shown.index("base") < shown.index("changed")


@pytest.mark.slow
def test_some_runs_of_a_study(study, tmp_path, capsys):
    """Beside the baseline; a branch's run with its trunk, whose arguments stay as they are."""
    branch = BRANCH[:-1].replace("base", "last")
    branch += ", other: {iteration: 20, runs: {late: --scale 2.3}}}"
    file = study(base="--scale 2", other="--scale 3", last="--scale 4", branch=branch)
    command = ["run", str(file), "--output", str(tmp_path / "out"), "--seeds", "1", "--only"]

    def folders() -> set[str]:
        return {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}

    main([*command, "last"])
    assert folders() == {"base-1", "last-1"}
    main([*command, "changed", "--keep-checkpoints"])
    assert folders() == {"base-1", "last-1", "changed-1"}
    # Its checkpoint was gone: a second time, from the beginning.
    assert "trains again" in capsys.readouterr().err
    assert [line["began"] for line in metrics(tmp_path / "out" / "last-1")] == [0] * 80
    main([*command, "changed"])
    assert len(metrics(tmp_path / "out" / "last-1")) == 80
    main([*command, "late"])
    assert folders() == {"base-1", "last-1", "changed-1", "other-1", "late-1"}
    assert metrics(tmp_path / "out" / "late-1")[0]["iteration"] == 21
    with pytest.raises(UserError, match=r"--only: no run 'mine'; use some of \['base', 'other'"):
        main([*command, "mine"])


def test_a_branch_starts_as_soon_as_its_trunk_has_saved(study, write_script, tmp_path):
    """The trunk ends once the branch has trained."""
    file, output = study(base="--scale 2", branch=BRANCH), tmp_path / "out"
    wait = """
branch = folder.parent / f"changed-{seed}" / "metrics.jsonl"
for _ in range(600):
    if folder == branch.parent or branch.is_file():
        break
    time.sleep(0.1)
else:
    sys.exit("no branch has started")
"""
    write_script('(folder / "iter_0000040").mkdir()', f'{wait}(folder / "iter_0000040").mkdir()')
    main(["run", str(file), "--output", str(output), "--seeds", "1", "--at-once", "2"])
    assert len(metrics(output / "base-1")) == 40 and len(metrics(output / "changed-1")) == 10


def test_a_branch_of_another_trunk_is_another_run(study, tmp_path):
    """Its arguments are the same; the folder of the study may have moved."""
    runs = {"base": "--scale 2", "other": "--scale 3"}
    before, after = (
        f"branches: {{base: {{iteration: 30, runs: {{x: '--scale 2.1 --more {{trunk}}'{a}}}}}, "
        f"other: {{iteration: 30, runs: {{y: --scale 2.1{b}}}}}}}"
        for a, b in ((", late: --scale 2.2", ""), ("", ", late: --scale 2.2"))
    )
    command = ["run", str(study(branch=before, **runs)), "--seeds", "1", "--output"]
    main([*command, str(tmp_path / "out")])
    trunk, branch = (tmp_path / "out" / name for name in ("base-1", "x-1"))
    assert {line["more"] for line in metrics(branch)} == {str(trunk / "iter_0000030")}
    (tmp_path / "out").rename(tmp_path / "moved")
    main([*command, str(tmp_path / "moved")])
    study(branch=after, **runs)
    began = (
        "late-1: holds a run that began from base-1/iter_0000030, not other-1/iter_0000030; give"
    )
    with pytest.raises(UserError, match=began):
        main([*command, str(tmp_path / "moved")])


def test_a_trunk_that_has_passed_its_branches_checkpoint(study, tmp_path):
    """It would continue from its last checkpoint, and never save the deleted one."""
    file, output = study(base="--scale 2", branch=BRANCH), tmp_path / "out"
    command = ["run", str(file), "--output", str(output), "--seeds", "1"]
    main([*command, "--only", "base", "--keep-checkpoints"])
    (output / "base-1" / "iter_0000030").rmdir()
    with pytest.raises(UserError, match=f"iter_0000030: is missing, .* delete {output}/base-1 to"):
        main(command)


@pytest.mark.parametrize("more", ["", "--more {trunk}"])
def test_a_stopped_branch_needs_its_trunk_only_for_its_arguments(study, tmp_path, more):
    """The trunk's checkpoint is gone, as after a command with --only another branch."""
    branch = f"branches: {{base: {{iteration: 30, runs: {{changed: '--scale 2.2 {more}'}}}}}}"
    file, output = study(base="--scale 2", branch=branch), tmp_path / "out"
    command = ["run", str(file), "--output", str(output), "--seeds", "1"]
    main(command)
    stop(output / "changed-1", 35)
    main(command)
    assert {line["began"] for line in metrics(output / "changed-1")} == {30, 35}
    assert len(metrics(output / "base-1")) == (80 if more else 40)


@pytest.mark.parametrize(
    ("tracker", "finished"),
    [(None, True), (None, False), pytest.param("", True, marks=pytest.mark.slow)],
)
def test_a_trunk_without_its_tracker_file(study, tmp_path, tracker, finished):
    """It is missing or empty; the newest complete checkpoint counts, as when a run resumes."""
    file, output = study(base="--scale 2", branch=BRANCH), tmp_path / "out"
    command = ["run", str(file), "--output", str(output), "--seeds", "1"]
    main([*command, "--only", "base", "--keep-checkpoints"])
    trunk = output / "base-1"
    files.write_document(trunk / "iter_0000030", {"files": {}})
    if not finished:
        (trunk / "iter_0000040").rmdir()
        stop(trunk, 30)
    (trunk / files.TRACKER).unlink()
    if tracker is not None:
        (trunk / files.TRACKER).write_text(tracker)
    main(command)
    assert {line["began"] for line in metrics(trunk)} == ({0} if finished else {0, 30})
    assert len(metrics(trunk)) == (40 if finished else 50)
    assert len(metrics(output / "changed-1")) == 10


@pytest.mark.slow
def test_trunks_are_skipped_with_their_branches(study, tmp_path):
    """Seed 3 of the trunk has finished, and its checkpoint is gone; seed 4 has not started."""
    branch = "branches: {trunk: {iteration: 30, runs: {late: --scale 4.1}}}"
    file, output = (
        study(base="--scale 2", near="--scale 2.02", trunk="--scale 4", branch=branch),
        tmp_path / "out",
    )
    command = ["run", str(file), "--output", str(output), "--at-once", "4", "--seeds"]
    main([*command, "1", "2"])
    main([*command, "3", "--only", "trunk"])
    main([*command, "1", "2", "3", "4", "--leave-out", "4"])
    assert len(metrics(output / "trunk-3")) == 40 and (output / "near-4").is_dir()
    assert not {"late-3", "trunk-4", "late-4"} & {path.name for path in output.iterdir()}


def test_a_branch_fails_with_its_trunk(study, write_script, tmp_path):
    """The trunk fails before it has saved."""
    file, output = study(base="--scale 2", branch=BRANCH), tmp_path / "out"
    write_script('(folder / f"iter_{i:07}").mkdir()', "sys.exit(3)")
    with pytest.raises(TrainingError, match="4 of 4 runs failed"):
        main(["run", str(file), "--output", str(output)])
    assert not (output / "changed-1").exists()


def test_recipes_are_compared_with_the_trunk_of_a_study(study, tmp_path):
    """Its run in the folder is not repeated, nor refused for other arguments."""
    branched = read_study(study(base="--scale 2", branch=BRANCH))
    trunk, mine = jobs_of(with_recipes(branched, ["nvfp4"]), tmp_path, [])[:2]
    assert trunk == jobs_of(branched, tmp_path, [])[0]
    assert mine.name == "nvfp4" and "--save-interval" not in mine.command
