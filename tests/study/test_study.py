"""Studies: their runs, failures and branches, and invalid files."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings

from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.study import runner
from megatron_lowbit.study.command import main
from megatron_lowbit.study.definition import (
    Job,
    Study,
    is_finished,
    jobs_of,
    launch_command,
    planned_iterations,
    read_study,
)
from tests.fuzzed_yaml import changed_documents, damaged_texts
from tests.marks import others_slow
from tests.short_runs import metrics

ROOT = Path(__file__).parents[2]


def test_every_run_of_every_seed(study, tmp_path, capsys):
    """At once; compared in the study's order; a second time nothing runs, nor other arguments."""
    file, output = study(base="--scale 2", other="--scale 2.1"), tmp_path / "out"
    command = ["run", str(file), "--output", str(output), "--at-once", "3", "--", "--more", "x"]
    main(command)
    folders = {f"{name}-{seed}" for name in ("base", "other") for seed in (1, 2)}
    assert {path.name for path in output.iterdir() if path.is_dir()} == folders
    for folder in folders:
        assert [line["iteration"] for line in metrics(output / folder)] == list(range(1, 41))
        assert {line["more"] for line in metrics(output / folder)} == {"x"}
        assert not list((output / folder).glob("iter_*"))
    assert "some-study" in (output / "comparison.html").read_text()
    shown = capsys.readouterr().out
    assert shown.index("base") < shown.index("other")
    main(command)
    assert len(metrics(output / "base-1")) == 40
    with pytest.raises(UserError, match=r"base-1: holds a run with other arguments"):
        main([*command[:-1], "y"])


@pytest.mark.slow
def test_a_run_that_is_far_behind_gets_no_further_seeds(study, tmp_path, capsys):
    """Its first two seeds are run, and are in the table; a resumed study omits it again."""
    file, output = study(base="--scale 2", near="--scale 2.02", far="--scale 4"), tmp_path / "out"
    command = ["run", str(file), "--output", str(output), "--leave-out", "4"]
    main([*command, "--seeds", "1", "2", "3"])
    folders = {path.name for path in output.iterdir() if path.is_dir()}
    assert folders == {"base-1", "base-2", "base-3", "near-1", "near-2", "near-3", "far-1", "far-2"}
    shown = capsys.readouterr()
    assert "far" in shown.out
    assert "near +" in shown.err and "(1 seed), far +" in shown.err
    main([*command, "--seeds", "1", "2", "3", "4"])
    assert (output / "near-4").is_dir() and not (output / "far-3").exists()


def test_a_run_that_ends_early_is_not_finished(study, write_script, tmp_path):
    """As at a signal to it alone, or --exit-interval: its checkpoint stays, and it continues."""
    file, output = study(base="--scale 2", other="--scale 2"), tmp_path / "out"
    write_script("time.sleep(float", "i != 7 or leave()\n        time.sleep(float")
    command = ["run", str(file), "--output", str(output), "--seeds", "1"]
    command += ["--", "--train-iters", "40"]
    with pytest.raises(TrainingError, match=r"2 of 2 .*: ended after 7 of 40 iterations"):
        main(command)
    assert not json.loads((output / "base-1" / "study.json").read_text())["finished"]
    main(command)
    assert [line["iteration"] for line in metrics(output / "base-1")] == list(range(1, 41))


def test_not_every_iteration_is_logged(tmp_path):
    """--tensorboard-log-interval 10 logs no 25th one, which the checkpoint tells."""
    job = Job("base", 1, tmp_path, [])
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 20}\n')
    assert runner._done(job) == 20
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("25")
    assert runner._done(job) == 25


def test_a_run_that_fails(study, tmp_path):
    """The others end; run again, only it begins again."""
    file, output = study(good="--scale 2", bad="--scale 2 --code 3"), tmp_path / "out"
    named = (
        rf"2 of 4 runs failed \(see output.log .*\): {output}/bad-1, {output}/bad-2: exit code 3$"
    )
    with pytest.raises(TrainingError, match=named):
        main(["run", str(file), "--output", str(output)])
    assert len(metrics(output / "good-2")) == 40
    assert json.loads((output / "good-2" / "study.json").read_text())["finished"]
    assert not json.loads((output / "bad-2" / "study.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        ("sys.exit('error: --lr: too high\\nWarning: a leak')", "--lr: too high"),
        ("raise ValueError('no such data')", "ValueError: no such data"),
        pytest.param("print('last words'); sys.exit(1)", "last words", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
    ],
)
def test_the_cause_of_a_failure_is_in_the_error(study, tmp_path, ending, cause):
    file = study(base="--scale 2")
    (tmp_path / "train.py").write_text(f"import os, signal, sys\n{ending}\n")
    with pytest.raises(TrainingError, match=f"base-2: {cause}$"):
        main(["run", str(file), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("arguments", "planned"),
    [
        ("--train-iters 250", 250),
        ("@preset.args", 30),
        ("@preset.args --train-iters=40", 40),
        ("--train-iters=30 --train-iters 40", 40),
        ("--train-iters 30 --train-iters=40", 40),
        ("--train-samples 400 --global-batch-size 8", 50),
        ("--lr 1", None),
    ],
)
def test_planned_iterations(tmp_path, monkeypatch, arguments, planned):
    """The total of a run's progress bar is what its arguments ask for."""
    monkeypatch.chdir(tmp_path)
    Path("preset.args").write_text("--train-iters 30\n")
    [job] = jobs_of(Study(arguments=arguments, seeds=[1], runs={"a": ""}), tmp_path, [])
    assert planned_iterations(job) == planned


TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --eval-iters 1
    --eval-interval 2 --save-interval 2 --log-interval 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 100
"""


@pytest.mark.slow
def test_recipes_compared_from_any_folder(tmp_path, monkeypatch, capsys):
    """One command trains with a shipped recipe and a file, without a checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("mine.yaml").write_text((ROOT / "recipes" / "fp8-tile.yaml").read_text())
    # A module of this name would be imported in the place of the library.
    Path("yaml.py").write_text("raise SystemExit(1)")
    command = ["run", "--recipes", "bf16", "mine.yaml", "--seeds", "3", "--output", "out"]
    main([*command, "--at-once", "2", "--", *TINY.split()])
    assert [path.name for path in sorted(Path("out").iterdir())] == [
        "bf16-3", "comparison.html", "comparison.png", "mine-3",
    ]  # fmt: skip
    assert [line["iteration"] for line in metrics(Path("out/mine-3"))] == [1, 2]
    shown = capsys.readouterr().out
    assert "gap to bf16" in shown and "│ mine" in shown
    assert "<h1>bf16, mine</h1>" in Path("out/comparison.html").read_text()


@pytest.mark.slow
def test_recipes_in_place_of_a_studys_runs(study, write_script, tmp_path):
    """The baseline, which is there already, and the seeds are the study's."""
    file, output = study(base="--scale 2", other="--scale 3"), tmp_path / "out"
    main(["run", str(file), "--output", str(output), "--seeds", "1"])
    mine = tmp_path / "mine.yaml"
    mine.write_text((ROOT / "recipes" / "nvfp4.yaml").read_text())
    more = ["--", "--more", "2"]
    with pytest.raises(UserError, match="base-1: holds a run with other arguments"):
        main(["run", str(file), "--recipes", str(mine), "--output", str(output), *more])
    write_script('arguments["--scale"]', "2")
    main(["run", str(file), "--recipes", str(mine), "--output", str(output)])
    folders = {path.name for path in output.iterdir() if path.is_dir()}
    assert folders == {"base-1", "base-2", "other-1", "mine-1", "mine-2"}
    state = json.loads((output / "mine-2" / "study.json").read_text())
    assert (state["name"], state["seed"]) == ("mine", 2)
    assert ["--precision-recipe", str(mine)] == state["command"][-4:-2]
    with pytest.raises(UserError, match="'base' is the study's baseline already"):
        base = tmp_path / "base.yaml"
        base.write_text(mine.read_text())
        main(["run", str(file), "--recipes", str(base), "--output", str(output)])


READ = ("mine.yaml", "more.args", "data.bin", "equal.yaml", "tokenizer/old.json")
SWITCHED = """
name: switched
configs: {high: {}}
matchers: {all: {type: glob, pattern: "*", config: high, enabled: true}}
switches: {later: {iteration: 9, to: then.yaml}}
"""


@pytest.mark.parametrize(
    "changed",
    others_slow(
        [*READ, "then.yaml", "tokenizer/new.json"], ["data.bin", "then.yaml", "tokenizer/new.json"]
    ),
)
def test_runs_of_files_that_have_changed_are_not_compared(study, tmp_path, changed, monkeypatch):
    """Runs of other seeds would differ in more than their seeds."""
    monkeypatch.chdir(tmp_path)
    Path("tokenizer").mkdir()
    for name in (*READ, "data.idx"):
        Path(name).write_text("1")
    Path("switched.yaml").write_text(SWITCHED)
    Path("then.yaml").write_text(SWITCHED.partition("switches")[0])
    file = study(
        base="--scale 2 --recipe mine.yaml --data data --more @more.args --x=equal.yaml --y=1 "
        "--to switched.yaml --tokenizer-model tokenizer"
    )
    command = ["run", str(file), "--output", "out", "--seeds"]
    main([*command, "1"])
    main([*command, "1", "2"])
    with Path(changed).open("a") as appended:
        appended.write("# 2\n" if changed == "then.yaml" else "2")  # a recipe stays one
    words = {"data.bin": "data", "more.args": "@more.args"}
    word = words.get(changed, changed).split("/")[0]
    with pytest.raises(UserError, match=f"base-1: holds a run from before {word} changed; give "):
        main([*command, "1", "2", "3"])


def test_a_comparison_takes_no_arguments_of_training(tmp_path):
    with pytest.raises(UserError, match="-- --lr 1: compare trains nothing; omit them"):
        main(["compare", str(tmp_path), "--", "--lr", "1"])


def test_a_comparison_that_cannot_be_written_is_refused_before_it_is_made(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("{}")
    with pytest.raises(UserError, match=f"--output {file}: {file} is a file, not a folder"):
        main(["compare", str(tmp_path), "--output", str(file)])


@pytest.mark.parametrize(
    ("count", "gpus", "message"),
    [
        (0, "0", "--gpus 0: this machine has 0 GPUs; omit it to train on the CPU"),
        (2, "1 2 7", "--gpus 2 7: this machine has 2 GPUs; the last is 1"),
    ],
)
def test_runs_on_gpus_do_not_fall_back_to_the_cpu(
    study, tmp_path, monkeypatch, count, gpus, message
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    given = [str(study(base="--scale 2")), "--output", str(tmp_path), "--gpus", *gpus.split()]
    with pytest.raises(UserError, match=message):
        main(["run", *given])


NUMBERS = {
    "from 1 to 1000": ["run --at-once 0", "run --at-once 1001"],
    "from 1 to 100000": ["plan --count 0", f"plan --count {10**30}"],
    "positive and finite": [f"run --minutes {number}" for number in ("nan", "-5", "0", "inf")],
    "not negative and finite": ["run --leave-out nan", "run --leave-out -1", "plan --start-up nan"],
}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("run", "give STUDY.yaml or --recipes"),
        ("run x.yaml --recipes bf16 nvfp4", "study file x.yaml does not exist"),
        ("run --recipes bf16", "two recipes or more"),
        ("run --recipes bf16 bf16", "two have the same name"),
        ("run --recipes bf16 nvfp5", "unknown recipe 'nvfp5'"),
        ("run --recipes bf16 nvfp4 --seeds 3 3", "seeds 3 3: each must be given once"),
        ("run --only x --recipes bf16 nvfp4", "--only names runs of STUDY.yaml: not with"),
        *[
            (f"{line} --recipes bf16 nvfp4", f"{line.split()[1]} .*: must be {words}")
            for words, lines in NUMBERS.items() for line in lines
        ],
    ],
)  # fmt: skip
def test_arguments_that_are_refused(tmp_path, arguments, named):
    with pytest.raises(UserError, match=named):
        main([*arguments.split(), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("arguments: x\nseeds: [1]\nruns: {}\n", "runs: dictionary should have at least 1"),
        ("arguments: x\nseeds: [one]\nruns: {a: b}\n", "seeds.0: input should be a valid integer"),
        ("arguments: x\nseeds: [1]\nruns: {a: b}\nsed: 3\n", "sed: no such key; use one of"),
        (
            "arguments: x\nseeds: [1]\nruns: {a: b}\nbranches: {c: {iteration: 1, runs: {d: e}}}\n",
            "the file: branches: no run 'c'",
        ),
        (
            "arguments: x\nseeds: [1]\nruns: {a: b, c: d}\n"
            "branches: {a: {iteration: 1, runs: {c: e}}}\n",
            "the file: branches: two runs are named 'c'",
        ),
        *[(f"script: {name!r}\n", f"script: there is no file {name!r}") for name in ("", "no.py")],
        ("- 1\n", "the file: input should be a valid dictionary"),
        ("a: [\n", "not YAML of a study: line 2: "),
        ("b: 2026-02-30\n", "b: no such key; use one of script, arguments"),
        ('arguments: "it\'s"\nseeds: [1]\nruns: {a: b}\n', "arguments: no closing quotation"),
        ("arguments: x\nseeds: [1]\nruns: {a: '\"'}\n", "runs.a: no closing quotation"),
        (
            "arguments: x\nseeds: [1]\nruns: {a: b}\n"
            'branches: {a: {iteration: 1, runs: {c: "\'"}}}\n',
            "branches.a.runs.c: no closing quotation",
        ),
    ],
)
def test_invalid_study_files(tmp_path, text, named):
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"study.yaml: {named}"):
        read_study(file)


def test_files_without_an_end_are_not_read(tmp_path):
    for file in (Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match=f"study file {file} is not a file"):
            read_study(file)


KEYS = ["script", "arguments", "seeds", "runs", "branches", "iteration", "bf16", "nvfp4"]
WORDS = [
    *["'", "\\", "@x", "@", "--train-iters=0", "--train-iters", "--train-samples 1", "=", "--"],
    *["--global-batch-size 0", "--train-samples=8 --global-batch-size=0", "/", "..", "#", "*"],
]
STUDIES = [file.read_text() for file in (ROOT / "examples" / "studies").glob("*.yaml")]
STUDIES.append("arguments: --train-samples 8 --global-batch-size 0\nseeds: [1]\nruns: {a: --b}\n")


@pytest.mark.parametrize("examples", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_study_file(tmp_path, monkeypatch, capsys, examples):
    """The jobs of a study, or one line."""
    monkeypatch.chdir(ROOT)
    file, seen = tmp_path / "study.yaml", []

    def take(jobs, *_):
        seen.extend(jobs)
        for job in jobs:
            planned_iterations(job)
            assert not is_finished(job)
            assert all(isinstance(word, str) for word in launch_command(job))
        return []

    monkeypatch.setattr(runner, "run", take)

    @settings(max_examples=examples)
    @given(content=damaged_texts(STUDIES) | changed_documents(STUDIES, KEYS, WORDS))
    def fuzz(content):
        file.write_bytes(content)
        try:
            main(["run", str(file), "--output", str(tmp_path / "out")])
        except UserError as error:
            assert str(error).isprintable()

    fuzz()
    assert seen, "no study was good"


def test_names_that_would_share_a_folder(study, tmp_path):
    file = study(**{"a b": "--scale 2", "a/b": "--scale 2"})
    with pytest.raises(UserError, match="another run's name is the same"):
        jobs_of(read_study(file), tmp_path, [])


@pytest.mark.parametrize("what", ["files", "a link", "a link to nothing"])
def test_folders_of_others_are_refused(study, tmp_path, what):
    """Their checkpoints would be continued, and deleted at the end."""
    file, output, other = study(base="--scale 2"), tmp_path / "out", tmp_path / "other"
    if what == "files":
        other = output / "base-1"
    else:
        output.mkdir()
        (output / "base-1").symlink_to(other)
    if what != "a link to nothing":
        (other / "iter_0000040").mkdir(parents=True)
    with pytest.raises(UserError, match="base-1: is a link, or holds files of no study"):
        main(["run", str(file), "--output", str(output)])
    assert what == "a link to nothing" or os.listdir(other) == ["iter_0000040"]


def test_only_checkpoints_are_deleted(study, write_script, tmp_path):
    file, output = study(base="--scale 2", other="--scale 2"), tmp_path / "out"
    more = (
        "\n(folder / 'iter_notes').mkdir(exist_ok=True)"
        "\n(folder / 'latest_notes.txt').write_text('')"
        "\n(folder / 'iter_0000009').symlink_to('iter_notes')\n"
    )
    write_script("sys.exit(int(", more + "sys.exit(int(")
    main(["run", str(file), "--output", str(output), "--seeds", "5"])
    assert not (output / "base-1").exists()
    left = {path.name for path in (output / "base-5").iterdir()}
    assert left == {"iter_notes", "iter_0000009", "latest_notes.txt", "metrics.jsonl",
                    "output.log", "study.json"}  # fmt: skip
