"""Studies that stop, after a time or by a signal, and that the next command continues."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.storage import files
from megatron_lowbit.study import runner
from megatron_lowbit.study.command import main
from megatron_lowbit.study.definition import Job, Start, Study, jobs_of, read_study, training_words
from megatron_lowbit.study.schedule import Pace, commands_of, pace_of
from tests.short_runs import metrics

TRACKER = "latest_checkpointed_iteration.txt"
RUN = "from megatron_lowbit.commands import study; study()"


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.is_file():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(arguments: list[str], output: Path) -> subprocess.Popen:
    """Start a study whose first run has logged an iteration."""
    # Whoever runs the tests in the background ignores Ctrl-C, and so would what they start.
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(output / "base-1" / "metrics.jsonl")
    return process


def test_jobs_are_divided_among_commands():
    """In order, on the first free GPU; a job that is too long gets a command of its own."""
    seconds = {"a": 4.0, "b": 6.0, "c": 5.0, "d": 5.0, "e": 30.0, "f": 1.0}

    def divided(slots: int, *names: str) -> list[str]:
        jobs = [Job(name, 1, Path(name), []) for name in names]
        commands = commands_of(jobs, lambda job: seconds[job.name], slots, 10.0, {})
        return ["".join(job.name for job in command) for command in commands]

    assert divided(1, "a", "b", "c", "d") == ["ab", "cd"]
    assert divided(2, "a", "b", "c", "d") == ["abc", "d"]
    assert divided(1, "a", "e", "f", "f") == ["a", "e", "ff"]
    assert divided(1) == []
    seconds["g"] = 0.0  # without a start-up, of a run that only has to be recorded as finished
    assert divided(1, "g", "a") == ["ga"]


def test_a_branch_waits_for_its_trunk_in_the_same_command():
    """Until 6 s; a later run takes the free place, and a later command waits for nothing."""
    trunk, other = (Job(name, 1, Path(name), []) for name in ("trunk", "other"))
    branch = Job("branch", 1, Path("branch"), [], Start(trunk.folder, 3))

    def divided(slots: int, jobs: list[Job], limit: float) -> list[list[str]]:
        commands = commands_of(jobs, lambda job: 7.0, slots, limit, {trunk.folder: 6.0})
        return [[job.name for job in command] for command in commands]

    assert divided(2, [trunk, branch], 13.0) == [["trunk", "branch"]]
    assert divided(2, [trunk, branch], 12.0) == [["trunk"], ["branch"]]
    assert divided(2, [trunk, branch, other], 14.0) == [["trunk", "other", "branch"]]
    assert divided(1, [trunk, branch, other], 7.0) == [["trunk"], ["branch"], ["other"]]


def test_runs_together_share_the_gpu():
    """A GPU that is busy for 8 of 20 ms has room for two runs, not for three."""
    pace = Pace(step=0.020, busy=0.008, iterations=1000)
    taken = [pace.seconds(at_once, start_up=5.0) for at_once in (1, 2, 3)]
    assert taken == pytest.approx([25.0, 25.0, 29.0])


def test_the_pace_is_the_planners():
    arguments = "@examples/gpt-20m.args --vocab-size 8192 --train-iters 7"
    [job] = jobs_of(Study(arguments=arguments, seeds=[1], runs={"a": ""}), Path("out"), [])
    pace = pace_of(job, "h100")
    assert pace.iterations == 7 and 0 < pace.busy < pace.step < 1
    with pytest.raises(UserError, match=r"--gpu h1000: not in hardware\.yaml"):
        pace_of(job, "h1000")


def test_a_plan_refuses_what_training_refuses():
    arguments = "@examples/gpt-20m.args --vocab-size 8192"
    runs = {"a": "--precision-recipe bf16", "b": "--fp4-recipe nvfp4 --sandwich-norm"}
    study = Study(arguments=arguments, seeds=[1], runs=runs)
    allowed, refused = jobs_of(study, Path("out"), ["--train-iters", "7"])
    assert pace_of(allowed, "h100").iterations == 7
    with pytest.raises(UserError, match=r"run 'b': .*--sandwich-norm"):
        pace_of(refused, "h100")


def test_arguments_of_training():
    study = Study(arguments="--lr 1", seeds=[1], runs={"a": ""})
    scripted = study.model_copy(update={"script": "train.py"})
    for variant in (study, scripted):
        [job] = jobs_of(variant, Path("out"), ["--more", "2"])
        assert training_words(job) == ["--lr", "1", "--more", "2", "--seed", "1"]


def began(folder: Path) -> list[int]:
    """Return the iterations that the parts of a run began after."""
    return sorted({line["began"] for line in metrics(folder)})


@pytest.mark.slow
def test_runs_stop_in_time_and_go_on_elsewhere(study, write_script, tmp_path, capsys):
    """A run that is stopped is not finished; its folder may be carried to another machine."""
    # In four seconds at most six iterations: the script resumes after the seventh.
    file = study(sleep=0.7, base="--scale 2", other="--scale 2")
    output, carried = tmp_path / "here", tmp_path / "there" / "runs"
    main(["run", str(file), "--output", str(output), "--minutes", str(4 / 60)])
    assert "4 runs are left; the same command continues with them" in capsys.readouterr().err
    assert [path.name for path in output.iterdir()] == ["base-1"]
    assert not json.loads((output / "base-1" / "study.json").read_text())["finished"]
    carried.parent.mkdir()
    output.rename(carried)
    write_script("time.sleep", "(lambda _: None)")
    main(["run", str(file), "--output", str(carried)])
    first, last = began(carried / "base-1")
    assert (first, last) == (0, 7)
    assert began(carried / "other-2") == [0]
    assert (carried / "comparison.html").is_file()


def test_no_run_is_started_that_would_not_end_in_time(study, tmp_path, capsys, monkeypatch):
    """The first takes 1.2 s of a clock that goes by its iterations: no second one begins in 2 s."""
    file, output = study(base="--scale 2", other="--scale 2"), tmp_path / "out"

    def now() -> float:
        logs = output.rglob("metrics.jsonl")
        return 0.03 * sum(len(log.read_text().splitlines()) for log in logs)

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    main(["run", str(file), "--output", str(output), "--minutes", str(2 / 60)])
    assert [path.name for path in sorted(output.iterdir()) if path.is_dir()] == ["base-1"]
    assert json.loads((output / "base-1" / "study.json").read_text())["finished"]
    assert "3 runs are left" in capsys.readouterr().err


def test_a_run_that_is_stopped_at_its_end_is_finished(study, write_script, tmp_path, monkeypatch):
    """The time is up after its last iteration, while it still saves."""
    file, output = study(base="--scale 2", other="--scale 2"), tmp_path / "out"
    write_script("sys.exit(int(", "time.sleep(60)\nsys.exit(int(")
    log = output / "base-1" / "metrics.jsonl"

    def now() -> float:
        return 0.025 * len(log.read_text().splitlines()) if log.is_file() else 0.0

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    words = ["--output", str(output), "--minutes", str(1 / 60), "--", "--train-iters", "40"]
    main(["run", str(file), *words])
    assert json.loads((output / "base-1" / "study.json").read_text())["finished"]
    assert not list(output.glob("base-1/latest*"))


def test_the_plan(tmp_path, capsys):
    """Finished runs are ignored; times are from the planner and the start-up."""
    file = tmp_path / "study.yaml"
    file.write_text(
        "arguments: '@examples/gpt-20m.args --vocab-size 8192'\nseeds: [1, 2]\n"
        "runs: {bf16: --precision-recipe bf16, nvfp4: --precision-recipe nvfp4}\n"
    )
    done = tmp_path / "out" / "bf16-1"
    done.mkdir(parents=True)
    [job, *_] = jobs_of(Study(
        arguments="@examples/gpt-20m.args --vocab-size 8192", seeds=[1],
        runs={"bf16": "--precision-recipe bf16"},
    ), tmp_path / "out", [])  # fmt: skip
    state = {"command": job.command[1:], "finished": True, "machine": {}}
    (done / "study.json").write_text(json.dumps(state))
    main(["plan", str(file), "--output", str(tmp_path / "out"), "--gpu", "h100",
          "--minutes", "1000", "--start-up", "30"])  # fmt: skip
    shown = capsys.readouterr().out
    assert "3 of 4 runs are left" in shown and "1 commands of 1000 minutes" in shown
    assert "1: nvfp4 1, bf16 2, nvfp4 2" in shown
    minutes = float(re.search(r"bf16 +│ 2500 +│ [\d.]+ +│ [\d.]+ +│ ([\d.]+)", shown)[1])
    assert minutes == pytest.approx(pace_of(job, "h100").seconds(1, 30) / 60, abs=0.051)


def test_the_plan_of_branches_and_of_runs_that_were_stopped(tmp_path, capsys):
    """Only iterations that are left take time."""
    file, output = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text(
        "arguments: '@examples/gpt-20m.args --vocab-size 8192'\nseeds: [1]\n"
        "runs: {trunk: --precision-recipe bf16}\n"
        "branches: {trunk: {iteration: 2000, runs: {late: --precision-recipe bf16}}}\n"
    )
    checkpoint = output / "trunk-1" / "iter_0001250"
    checkpoint.mkdir(parents=True)
    files.write_document(checkpoint, {"files": {}})
    (output / "trunk-1" / "study.json").write_text(
        json.dumps({"command": jobs_of(read_study(file), output, [])[0].command[1:],
                    "finished": False, "machine": {}})
    )  # fmt: skip
    main(["plan", str(file), "--output", str(output), "--gpu", "h100", "--start-up", "0"])
    shown = capsys.readouterr().out
    cells = {
        name: [float(cell) for cell in re.search(rf"{name} +│ ([^\n]*)", shown)[1].split("│")[:4]]
        for name in ("trunk", "late")
    }
    assert (cells["trunk"][0], cells["late"][0]) == (2500, 500)
    assert cells["late"][3] == pytest.approx(cells["trunk"][3] / 5, abs=0.1)
    # Half of the trunk and a fifth are left. On two GPUs the branch starts when the trunk saves,
    # and ends one start-up after it.
    trunk = cells["trunk"][3]
    for count, start_up, minutes, commands in (
        (1, 0, 0.75 * trunk, 1), (1, 0, 0.65 * trunk, 2),
        (2, 60, 0.5 * trunk + 2.5, 1), (2, 60, 0.5 * trunk + 1.5, 2),
    ):  # fmt: skip
        main(["plan", str(file), "--output", str(output), "--gpu", "h100", "--start-up",
              str(start_up), "--count", str(count), "--minutes", str(minutes)])  # fmt: skip
        assert f"{commands} commands of" in capsys.readouterr().out
    state = json.loads((output / "trunk-1" / "study.json").read_text())
    (output / "trunk-1" / "study.json").write_text(json.dumps({**state, "finished": True}))
    main(["plan", str(file), "--output", str(output), "--gpu", "h100", "--start-up", "0"])
    # The checkpoint of iteration 2000 is gone.
    assert "2 of 2 runs are left" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_study_goes_on(study, write_script, tmp_path):
    """Ctrl-C stops the run with a checkpoint, in one line; run again, it goes on from there."""
    file, output = study(sleep=0.1, base="--scale 2"), tmp_path / "out"
    arguments = ["run", str(file), "--seeds", "1", "--output", str(output)]
    first = started(arguments, output)
    os.kill(first.pid, signal.SIGINT)
    _, shown = first.communicate(timeout=30)
    assert first.returncode == 130
    assert shown.endswith(b"interrupted; the same command resumes the study\n")
    assert b"Traceback" not in shown and b"7" in (output / "base-1" / TRACKER).read_bytes()
    write_script("time.sleep", "(lambda _: None)")
    main(arguments)
    assert began(output / "base-1") == [0, 7]
    assert metrics(output / "base-1")[-1]["iteration"] == 40


@pytest.mark.slow
def test_a_second_ctrl_c_waits_for_no_checkpoint(study, write_script, tmp_path):
    file, output = study(sleep=0.1, base="--scale 2"), tmp_path / "out"
    write_script("sys.exit()", "time.sleep(60)")
    study_run = started(["run", str(file), "--output", str(output)], output)
    os.kill(study_run.pid, signal.SIGINT)
    wait_for(output / "base-1" / TRACKER)
    os.kill(study_run.pid, signal.SIGINT)
    _, shown = study_run.communicate(timeout=30)
    assert study_run.returncode == 130 and b"Traceback" not in shown
    assert shown.endswith(b"interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_study_that_is_ended_leaves_no_run(study, tmp_path, number):
    """Its run saves a checkpoint. Meanwhile a second study into the folder is refused."""
    file, output = study(sleep=0.1, base="--scale 2"), tmp_path / "out"
    arguments = ["run", str(file), "--seeds", "1", "--output", str(output)]
    first = started(arguments, output)
    with pytest.raises(UserError, match=f"--output {output}: in use by process {first.pid}"):
        main(arguments)
    os.kill(first.pid, number)
    assert first.wait(timeout=30) == (143 if number == signal.SIGTERM else -number)
    wait_for(output / "base-1" / TRACKER)
    assert (output / "base-1" / TRACKER).read_text() == "7"
