"""examples/launch/slurm.sbatch without Slurm: what it tells srun, which here only prints it."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/launch/slurm.sbatch"
JOB = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}


@pytest.fixture
def run(tmp_path):
    """Runs the script in ``tmp_path``; returns the lines that srun prints."""
    commands = tmp_path / "commands"
    commands.mkdir()
    texts = {
        "srun": 'printf \'%s\\n\' "$MASTER_ADDR:$MASTER_PORT $WORLD_SIZE" "$@"',
        "scontrol": "echo node1; echo node2",
    }
    for name, text in texts.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    path = os.pathsep.join((str(commands), os.environ["PATH"]))

    def script(**variables: str) -> list[str]:
        result = subprocess.run(
            ["bash", SCRIPT, "checkpoints", "pretrain_gpt.py", "--seed", "1 2"],
            cwd=tmp_path, env={**os.environ, "PATH": path, **JOB, **variables},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return result.stdout.splitlines()

    return script


def test_without_a_container(run, tmp_path):
    first, *arguments = run(PYTHON="python3.12")
    assert first == "node1:15007 16"
    assert not [argument for argument in arguments if argument.startswith("--container")]
    folder = str(tmp_path / "checkpoints")
    training = ["pretrain_gpt.py", "--seed", "1 2", "--save", folder, "--load", folder]
    training.append("--exit-signal-handler")
    assert arguments[-9:] == ["python3.12", *training]


def test_in_a_container(run, tmp_path):
    """Mounts of pyxis: this folder and the checkpoints' at their own paths, and the rest."""
    arguments = run(IMAGE="image.sqsh", MOUNTS="/data:/data")
    here, folder = str(tmp_path), str(tmp_path / "checkpoints")
    assert "--container-image=image.sqsh" in arguments
    assert f"--container-workdir={here}" in arguments
    assert f"--container-mounts={here}:{here},{folder}:{folder},/data:/data" in arguments
