"""The tiny dataset of tests/end_to_end, and what lies here importable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = map(str, (HERE, HERE.parent / "end_to_end"))  # importlib mode adds no paths


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with ``data.bin``, ``data.idx`` and ``tokenizer/``."""
    import tiny_run  # torch and megatron: not for the quick tests here

    folder = tmp_path_factory.mktemp("corpus")
    tiny_run.write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def launch():
    """Starts a command in the background, its output added to a log file.

    What still runs in the end is told to stop, as torchrun tells its processes then.
    """
    started: list[subprocess.Popen] = []

    def begin(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
        with open(log, "a") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
            )
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
