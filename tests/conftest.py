"""Without a GPU, Triton's kernels run in its interpreter, and tests marked ``gpu`` are skipped."""

import gc
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

# Before torch is imported, also for the processes that tests start: on two cores two pytest workers
# with two threads each spend most of their time waiting for one another.
os.environ["OMP_NUM_THREADS"] = "1"
# Compile in the same process: torch.compile would start another one that imports torch again.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Take it that the compiler builds for this processor. To find out, torch.compile has new processes
# import torch, which takes 6 s in each process that compiles.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# A missing tokenizer is not looked up on the Hugging Face hub, which takes 50 s without a network.
# The library reads it when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

ROOT = Path(__file__).parents[1]

if not torch.cuda.is_available():
    # Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.interpreter  # noqa: F401
    import tests.interpreter  # noqa: F401


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_collection_finish():
    """Exempt modules and tests from garbage collection: each run of training collects at its end.

    Going through some millions of objects that live until the end takes as long as two iterations.
    """
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def write_checkpoint():
    """Writes a small checkpoint in the format torch_dist, as Megatron-LM would, but no tracker."""
    from torch.distributed.checkpoint import DefaultSavePlanner, save

    def write(path: Path) -> Path:
        common = {"args": Namespace(lr=1.0), "iteration": int(path.name.removeprefix("iter_"))}
        state = {
            "model.weight": torch.arange(12.0).view(3, 4),
            "model.extra/shard_0_1": [{"state": 1}],
            "common_state/shard_0_1": [common],
        }
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(state, checkpoint_id=path, planner=planner, no_dist=True)
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        return path

    return write


@pytest.fixture
def saved(write_checkpoint, tmp_path) -> Path:
    """A folder with checkpoints of iterations 1, 2 and 3, all on record."""
    from megatron_lowbit.storage import files

    directory = tmp_path / "saved"
    for number in (1, 2, 3):
        path = write_checkpoint(files.iteration_directory(directory, number))
        files.write_document(path, {"files": files.checksums(path)})
    files.write_tracker(directory, 3)
    return directory


def not_sources(folder: str, names: list[str]) -> set[str]:
    """Return which of a folder's entries are made by building, testing and training."""
    made = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")(folder, names)
    return made | {"build", "data", "dist", "runs"} if Path(folder) == ROOT else made


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution and the wheel that is made from it alone."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "sources", symlinks=True, ignore=not_sources)
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(folder / "sources")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return folder


@pytest.fixture(scope="session")
def site(built) -> Path:
    """A folder with the installed wheel."""
    folder = built / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
    subprocess.run([*install, str(next(built.glob("*.whl")))], check=True, capture_output=True)
    return folder


@pytest.fixture
def installed(site, tmp_path):
    """Runs a command of the installed wheel, or Python, in an empty folder; returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join(
        [str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )

    def run(*command: str) -> str:
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    where = run("python", "-c", "import megatron_lowbit; print(megatron_lowbit.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    return run
