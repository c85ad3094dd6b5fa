"""A study: runs of one model that differ in a few arguments, each for several seeds."""

import hashlib
import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, StrictInt, ValidationError, model_validator

from megatron_lowbit.analysis.machine import machine
from megatron_lowbit.arguments.values import LARGEST_SEED
from megatron_lowbit.command_line import expand_files
from megatron_lowbit.data.dataset import data_digest, dataset_digest
from megatron_lowbit.data.tokenizer import files_read
from megatron_lowbit.errors import UserError, error_prefix, require
from megatron_lowbit.folders import STUDY_RUN, replace_text, writing
from megatron_lowbit.json_files import Entries, read_object
from megatron_lowbit.recipes.record import files_named_by
from megatron_lowbit.recipes.yaml_reader import StrictModel, first_error, read_text, read_yaml
from megatron_lowbit.storage.files import TRACKER, iteration_directory, latest_iteration

_OF_STUDIES = {
    "--save": "the study gives each run its folder; omit it",
    "--seed": "the study gives each run its seed; give --seeds, or seeds of the study file",
    "--finetune": "a run that resumes would begin again; give --pretrained-checkpoint",
    "--ckpt-step": "a run that resumes would look for this iteration in its own folder; omit it",
    "--no-load-optim": "a run that resumes would lose its optimizer's state; omit it",
    "--no-load-rng": "a run that resumes would repeat its random numbers; omit it",
}
"""Arguments of training that would have no effect, or another one, with ways out."""
_OF_TRUNKS = dict.fromkeys(
    ("--save-keep-last", "--save-retain-interval"),
    "would delete the checkpoint that branches begin from; omit it",
)
# lowbit-pretrain, whose script need not be on PATH; -P: modules of the folder stay out, as there.
_PRETRAIN = ("-P", "-c", "from megatron_lowbit.commands import pretrain; pretrain()")


def _shell_words(text: str) -> str:
    shlex.split(text)  # raises ValueError for an open quote
    return text


def _file(name: str) -> str:
    if not os.path.isfile(name):
        raise ValueError(f"there is no file {name!r}")
    return name


Arguments = Annotated[str, AfterValidator(_shell_words)]
"""Arguments as a shell command has them."""


class Branch(StrictModel):
    """Runs that begin from the checkpoint of an iteration of a trunk, a run of the same seed.

    ``{trunk}`` in their arguments is this checkpoint's folder.
    """

    iteration: int = Field(ge=1, strict=True)
    runs: dict[str, Arguments] = Field(min_length=1)


class Study(StrictModel):
    """Study of a YAML file; arguments are as on a command line.

    ``arguments`` are for all runs, ``runs`` name the further ones of each, the baseline first;
    ``branches`` go off some of these, their trunks. ``script`` is a training script of a user's
    own; None for ``lowbit-pretrain``.
    """

    script: Annotated[str, AfterValidator(_file)] | None = None
    arguments: Arguments
    seeds: list[StrictInt] = Field(min_length=1)
    runs: dict[str, Arguments] = Field(min_length=1)
    branches: dict[str, Branch] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_the_trunks(self) -> "Study":
        for trunk in self.branches.keys() - self.runs.keys():
            raise ValueError(f"branches: no run {trunk!r}")
        for name, count in Counter(self.names).items():
            if count > 1:
                raise ValueError(f"branches: two runs are named {name!r}")
        return self

    @property
    def names(self) -> list[str]:
        """Names of all runs, the branches' last."""
        return [*self.runs, *(name for branch in self.branches.values() for name in branch.runs)]


class Start(NamedTuple):
    """The checkpoint that a run begins from."""

    folder: Path
    iteration: int


class Job(NamedTuple):
    """One run of one seed, in a folder of its own; ``command`` has ``{trunk}`` as it is."""

    name: str
    seed: int
    folder: Path
    command: list[str]
    start: Start | None = None


def read_study(file: Path) -> Study:
    """Read a study. Raises UserError that names the file and the key if it is invalid."""
    text = read_text(file, f"study file {file}")
    with error_prefix(f"{file}: not YAML of a study: "):
        content = read_yaml(text)
    try:
        return Study.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{file}: {first_error(error)}") from None


def study_of(recipes: Sequence[str], seeds: Sequence[int]) -> Study:
    """Build the study of runs that differ only in their recipe, the baseline first.

    Raises UserError unless there are two recipes or more, of different names.
    """
    require(len(recipes) > 1, "--recipes: give two recipes or more, the baseline first")
    return Study(arguments="", seeds=list(seeds), runs=_runs_of(recipes))


def with_recipes(study: Study, recipes: Sequence[str]) -> Study:
    """Return a study of the same arguments: its baseline, and these recipes in place of its runs.

    Raises UserError for two of one name.
    """
    baseline, runs = study.names[0], _runs_of(recipes)
    require(baseline not in runs, f"--recipes: {baseline!r} is the study's baseline already")
    runs = {baseline: study.runs[baseline], **runs}
    # Keep branches, without their runs: they set the --save-interval of the trunk.
    branches = {name: each.model_copy(update={"runs": {}}) for name, each in study.branches.items()}
    return study.model_copy(update={"runs": runs, "branches": branches})


def with_runs(study: Study, names: Sequence[str]) -> Study:
    """Return a study of its baseline and some of its runs; a branch's run brings its trunk.

    Raises UserError for a name that no run has.
    """
    for name in names:
        require(name in study.names, f"--only: no run {name!r}; use some of {study.names}")
    wanted, branches = {study.names[0], *names}, {}
    for trunk, branch in study.branches.items():
        runs = {name: words for name, words in branch.runs.items() if name in wanted}
        wanted |= {trunk} if runs else set()
        # Also without runs, as in with_recipes.
        branches[trunk] = branch.model_copy(update={"runs": runs})
    runs = {name: words for name, words in study.runs.items() if name in wanted}
    return study.model_copy(update={"runs": runs, "branches": branches})


def _runs_of(recipes: Sequence[str]) -> dict[str, str]:
    runs = {Path(recipe).stem: shlex.join(["--precision-recipe", recipe]) for recipe in recipes}
    require(len(runs) == len(recipes), f"--recipes {' '.join(recipes)}: two have the same name")
    return runs


def jobs_of(study: Study, output: Path, more: list[str]) -> list[Job]:
    """Return all runs, every name's first seed first; ``more`` are from the command line.

    Raises UserError for seeds that training refuses or that are given twice, for names that would
    share a folder, for arguments that a study sets itself or that delete a branch's checkpoint, for
    a branch after the end of its trunk, and where ``more`` would replace an argument by which a run
    differs.
    """
    seeds = " ".join(map(str, study.seeds))
    require(len(set(study.seeds)) == len(study.seeds), f"seeds {seeds}: each must be given once")
    in_range = min(study.seeds) >= 1 and max(study.seeds) <= LARGEST_SEED
    require(in_range, f"seeds {seeds}: must be from 1 to {LARGEST_SEED}")
    program = [study.script] if study.script else _PRETRAIN

    def job_of(name: str, seed: int, words: str, start: Start | None = None) -> Job:
        own = shlex.split(words)
        taken = set(_flags(own)) & set(_flags(more)) - {"--recipe-set"}  # which adds up
        message = "is given after --, too, for all runs; omit it in one place"
        require(not taken, f"run {name!r}: {', '.join(sorted(taken))}: {message}")
        arguments = [*shlex.split(study.arguments), *own, *more]
        if name in study.branches:
            arguments += ["--save-interval", str(study.branches[name].iteration)]
        command = [sys.executable, *program, *arguments, "--seed", str(seed)]
        return Job(name, seed, _folder(output, name, seed), command, start)

    jobs: list[Job] = []
    for seed in study.seeds:
        jobs += [job_of(name, seed, words) for name, words in study.runs.items()]
        for trunk, branch in study.branches.items():
            start = Start(_folder(output, trunk, seed), branch.iteration)
            jobs += [job_of(name, seed, words, start) for name, words in branch.runs.items()]
    folders = Counter(job.folder for job in jobs)
    lengths = {job.folder: planned_iterations(job) or math.inf for job in jobs}
    for job in jobs:
        if job.start is not None:
            last = min(lengths[job.start.folder], lengths[job.folder] - 1)
            begin = f"run {job.name!r}: begins at iteration {job.start.iteration}"
            require(job.start.iteration <= last, f"{begin}; it must be {last} or earlier")
        require(
            folders[job.folder] == 1,
            f"run {job.name!r}: another run's name is the same in a file's name",
        )
        flags = _flags(training_words(job)[:-2])
        of_trunks = _OF_TRUNKS if job.name in study.branches else {}
        for flag, why in (_OF_STUDIES | of_trunks).items():
            require(flag not in flags, f"run {job.name!r}: {flag}: {why}")
        # Only trunks get it from the study: without it, branches fail once their trunk has trained.
        saves = job.start is None or bool(study.script) or "--save-interval" in flags
        require(saves, f"run {job.name!r}: lowbit-pretrain needs --save-interval; add it")
    return jobs


def _flags(words: Sequence[str]) -> list[str]:
    """Return the names of arguments in words of a command line."""
    return [word.partition("=")[0] for word in expand_files(words) if word.startswith("--")]


def _folder(output: Path, name: str, seed: int) -> Path:
    slug = "".join(c if c.isalnum() or c in "._" else "-" for c in name)
    return output / f"{slug}-{seed}"


def planned_iterations(job: Job) -> int | None:
    """Return the number of iterations that a job's arguments ask for; None if they do not."""
    given = {}
    for word, following in pairwise([*expand_files(job.command), ""]):
        flag, equals, value = word.partition("=")
        given[flag] = value if equals else following
    try:
        if "--train-samples" in given:
            return int(given["--train-samples"]) // int(given["--global-batch-size"])
        return int(given["--train-iters"])
    except (KeyError, ValueError, ZeroDivisionError):
        return None


def training_words(job: Job) -> list[str]:
    """Return the arguments of training in a job's command."""
    begin = 1 + len(_PRETRAIN)
    return job.command[begin if tuple(job.command[1:begin]) == _PRETRAIN else 2 :]


def is_finished(job: Job) -> bool:
    """Return True if an earlier command has finished a run.

    Raises UserError if its folder is of another command, of files that have changed since, or of no
    study.
    """
    file = job.folder / STUDY_RUN
    if not file.is_file():
        others = {path.name for path in job.folder.glob("*")} - {f".{STUDY_RUN}.partial"}
        require(
            not others and not job.folder.is_symlink(),
            f"{job.folder}: is a link, or holds files of no study; give another --output",
        )
        return False
    state = Entries(read_object(file), str(file))
    require(
        state.strings("command") == job.command[1:],
        f"{job.folder}: holds a run with other arguments; give another --output",
    )
    digests = state.inner("inputs")
    changed = [word for word, now in _inputs(job).items() if digests.string(word, now) != now]
    since = f"before {', '.join(changed)} changed"
    require(not changed, f"{job.folder}: holds a run from {since}; give another --output")
    start = _start_of(job)
    begun = state.string("start", start)
    message = f"holds a run that began from {begun}, not {start}; give another --output"
    require(begun == start, f"{job.folder}: {message}")
    return state.boolean("finished")


def _start_of(job: Job) -> str:
    """Return the checkpoint that a run begins from, wherever the folder of the study is."""
    if job.start is None:
        return "the first iteration"
    return str(iteration_directory(Path(job.start.folder.name), job.start.iteration))


def jobs_left(jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """Return the jobs to run, and which of them have finished: trunks whose checkpoint is gone."""
    unfinished = [job for job in jobs if not is_finished(job)]
    needed = checkpoints_needed(unfinished)
    again = [job for job in jobs if job.folder in needed and job not in unfinished]
    return [job for job in jobs if job in unfinished or job in again], again


def checkpoints_needed(jobs: Sequence[Job]) -> dict[Path, int]:
    """Return the iterations that trunks have yet to save for jobs, by the folder of the trunk.

    A job that continues from its own checkpoint needs the trunk's only as the ``{trunk}`` of its
    arguments.
    """
    return dict(
        job.start for job in jobs
        if job.start and (not _has_begun(job) or "{trunk}" in " ".join(job.command))
        and not has_saved(job.start)
    )  # fmt: skip


def _has_begun(job: Job) -> bool:
    """Return True if a job has a checkpoint of its own to continue from."""
    return (job.folder / TRACKER).is_file()


def _inputs(job: Job) -> dict[str, str]:
    """Return digests of the local files that a job's words name.

    Those are files of arguments, recipes and what they name, data sets, and tokenizers in files or
    folders.
    """
    words = training_words(job)
    read = expand_files(words)
    sha256 = hashlib.sha256(json.dumps(read).encode()).hexdigest()
    digests = {word: sha256 for word in words if word.startswith("@")}
    for previous, word in pairwise(["", *read]):
        flag, _, name = word.partition("=") if word.startswith("--") else (previous, "", word)
        if file := next(filter(os.path.isfile, (name, f"{name}.bin")), None):
            digests[name] = _digest(name, os.stat(file).st_mtime_ns)
            with suppress(UserError):  # It is no recipe.
                named = filter(os.path.isfile, files_named_by(name))
                digests |= {each: _digest(each, os.stat(each).st_mtime_ns) for each in named}
        elif name and flag == "--tokenizer-model" and (files := files_read(name)):
            content = "".join(map(data_digest, files))
            digests[name] = hashlib.sha256(content.encode()).hexdigest()
    return digests


@cache
def _digest(word: str, _changed: int) -> str:
    return str(dataset_digest(word))


def mark(job: Job, finished: bool) -> None:
    """Write down which run a folder holds, of what files, on what machine, with what versions."""
    file = job.folder / STUDY_RUN
    state = read_object(file) if finished else {
        "name": job.name,
        "seed": job.seed,
        "command": job.command[1:],
        "inputs": _inputs(job),
        "start": _start_of(job),
        "machine": machine(),
    }  # fmt: skip
    with writing("--output", file):
        job.folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps({**state, "finished": finished}, indent=1) + "\n")


def has_saved(start: Start) -> bool:
    """Return True if a trunk has saved the checkpoint that branches start from.

    Raises UserError if the trunk has passed this checkpoint, which is gone.
    """
    try:
        latest = latest_iteration(start.folder) or 0
    except UserError:  # The trunk is writing the tracker file, which is empty at first.
        return False
    checkpoint, is_past = iteration_directory(*start), latest >= start.iteration
    advice = f"restore it, or delete {start.folder} to train it again"
    message = f"{checkpoint}: is missing, and branches begin from it; {advice}"
    require(not is_past or checkpoint.is_dir(), message)
    return is_past


def launch_command(job: Job) -> list[str]:
    """Return a job's command with its folder and the checkpoint that it continues from."""
    load: list[str] = []
    if _has_begun(job):
        load = ["--load", str(job.folder)]
    elif job.start:
        load = ["--load", str(job.start.folder), "--ckpt-step", str(job.start.iteration),
                "--resume-changed", "recipe", "data"]  # fmt: skip
    trunk = str(iteration_directory(*job.start)) if job.start else "{trunk}"
    command = [word.replace("{trunk}", trunk) for word in job.command]
    return [*command, "--save", str(job.folder), *load, "--exit-signal-handler"]
