"""Without a GPU, Triton's kernels run in its interpreter, and tests marked ``gpu`` are skipped."""

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def run_ranks():
    """Runs a test file that is its own worker, a process for each rank, which it is told last."""

    def run(
        script: str, ranks: int, *arguments: object, timeout: float, **environment: str
    ) -> None:
        command = [sys.executable, script, *map(str, arguments)]
        workers = [
            subprocess.Popen(
                [*command, str(rank)],
                env=os.environ | environment, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        errors = [worker.communicate(timeout=timeout)[1] for worker in workers]
        # Of each, its traceback: what CUDA says while a process ends is longer.
        shown = "\n".join(error[error.find("Traceback") :][:3000] for error in errors)
        assert not any(worker.returncode for worker in workers), shown

    return run
