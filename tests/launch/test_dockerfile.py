"""Dockerfile: what it copies, pins and runs exists, and agrees with the rest of the project.

Nothing is built here; of the commands, only pip's choice of a torch is tried.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.torch_index import WITHOUT_OTHERS, index_of_torch

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()


def _stages() -> dict[str, list[tuple[str, str]]]:
    """Return the (instruction, arguments) of each stage, by its name, in the file's order."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            image, _, name = arguments.partition(" AS ")
            stages[name] = [("FROM", image)]
        else:
            stages[name].append((instruction, arguments.strip()))
    return stages


STAGES = _stages()
COPIES = [
    source
    for instructions in STAGES.values()
    for instruction, arguments in instructions
    if instruction == "COPY"
    for source in [a for a in arguments.split() if not a.startswith("--")][:-1]
]


def of(stage: str, instruction: str) -> list[str]:
    return [arguments for name, arguments in STAGES[stage] if name == instruction]


def test_gpu_is_the_default_target():
    assert list(STAGES) == ["cpu", "gpu"]


@pytest.mark.parametrize("source", sorted(set(COPIES)))
def test_what_is_copied_exists_and_is_not_ignored(source):
    assert (ROOT / source).exists()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert source not in ignored


def test_what_the_build_reads_is_copied():
    """The first layer of the CPU's image builds the package from these files alone."""
    assert {"pyproject.toml", "setup.py", "README.md", *PROJECT["license-files"]} <= set(COPIES)


def test_nothing_hidden_is_copied():
    """Git's history, environments and caches, hundreds of megabytes."""
    assert ".*" in (ROOT / ".dockerignore").read_text().split()


@pytest.mark.parametrize("stage", STAGES)
def test_nobody_runs_as_root(stage):
    """A number, as Kubernetes can tell from no name that it is not root's; its manifest's."""
    user = int(of(stage, "USER")[-1])
    assert user > 0
    assert any(f"--uid {user} " in command for command in of(stage, "RUN"))
    documents = yaml.safe_load_all((ROOT / "examples/launch/kubernetes.yaml").read_text())
    job_set = next(document for document in documents if document["kind"] == "JobSet")
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == user


@pytest.mark.parametrize("stage", STAGES)
def test_base_images_are_pinned(stage):
    assert re.search(r":\d+\.\d+[\w.-]*$", of(stage, "FROM")[0])


@pytest.mark.slow
def test_no_torch_is_taken_where_the_cpu_index_has_none(tmp_path):
    """PyPI's torch of the same version is CUDA's. The Makefile's command is the same."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ").replace("$$", "$")
    version = next(p for p in CONSTRAINTS if p.startswith("torch==")).removeprefix("torch==")
    pypi = index_of_torch(tmp_path / "pypi", version)
    cpu = index_of_torch(tmp_path / "cpu", f"{version}+cpu")
    only = {"PIP_INDEX_URL": pypi, "PIP_DRY_RUN": "1", "PIP_IGNORE_INSTALLED": "1"}
    for text in (" ".join(of("cpu", "RUN")), makefile):
        command, url = re.search(r"pip (install --no-deps .*?(https://\S+/whl/cpu))", text).groups()
        for index, found in ((cpu, True), ((tmp_path / "none").as_uri(), False)):
            pip = f"{sys.executable} -m pip {command.replace(url, index)}"
            result = subprocess.run(
                pip, shell=True, cwd=ROOT, env=os.environ | WITHOUT_OTHERS | only,
                capture_output=True, text=True,
            )  # fmt: skip
            assert (f"Would install torch-{version}+cpu" in result.stdout) == found, result
            assert ("No matching distribution found for torch==" in result.stderr) != found, result


def test_python_fits():
    version = re.match(r"python:(\d+\.\d+\.\d+)", of("cpu", "FROM")[0])[1]
    assert version in SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize("stage", STAGES)
def test_labels(stage):
    labels = dict(re.findall(r'([\w.]+)="([^"]*)"', " ".join(of(stage, "LABEL"))))
    assert labels["org.opencontainers.image.version"] == PROJECT["version"]
    assert labels["org.opencontainers.image.title"] == PROJECT["name"]
    assert labels["org.opencontainers.image.licenses"] == PROJECT["license"]


def test_the_gpu_image_has_the_versions_of_the_extras():
    commands = " ".join(of("gpu", "RUN"))
    extras = PROJECT["optional-dependencies"]
    for requirement in map(Requirement, extras["te"] + extras["mamba"] + extras["liger"]):
        # Transformer Engine is in three packages.
        assert set(re.findall(rf"{requirement.name}\w*==(\S+)", commands)) == {
            str(requirement.specifier).removeprefix("==")
        }


def test_the_gpu_image_keeps_its_torch():
    """The script in the Dockerfile names all that the project needs but torch; grep, its pins."""
    command = next(run for run in of("gpu", "RUN") if "tomllib" in run)
    script = re.search(r'python -c "(.*?)"', command)[1]
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    needed = [d for d in PROJECT["dependencies"] if Requirement(d).name != "torch"]
    assert result.stdout.split("\n") == [*needed, ""], result.stderr
    left_out = re.compile(re.search(r"--extended-regexp '(\S+)'", command)[1])
    assert [p.partition("==")[0] for p in CONSTRAINTS if left_out.match(p)] == ["torch", "triton"]


@pytest.mark.parametrize("stage", STAGES)
def test_the_command_is_installed(stage):
    program = json.loads(of(stage, "CMD")[0])[0]
    assert program in PROJECT["scripts"] or f"{program}==" in "\n".join(CONSTRAINTS)
