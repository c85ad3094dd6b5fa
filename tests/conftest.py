"""Without a GPU, Triton's kernels run in its interpreter, and tests marked ``gpu`` are skipped."""

import gc
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, also for the processes that tests start: on two cores two pytest workers
# with two threads each spend most of their time waiting for one another.
os.environ["OMP_NUM_THREADS"] = "1"
# Compile in the same process: torch.compile would start another one that imports torch again.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Take it that the compiler builds for this processor. To find out, torch.compile has new processes
# import torch, which takes 6 s in each process that compiles.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# Precompiling torch's headers takes longer than it saves in the few builds of make test.
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
# A missing tokenizer is not looked up on the Hugging Face hub, which takes 50 s without a network.
# The library reads it when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

from tests import processes

ROOT = Path(__file__).parents[1]
# Garbage is collected after each run of training, and at the end of a file.
gc.set_threshold(100_000, 20, 20)

# `make test` repeats the same examples; `make test-all` chooses the profile that draws others.
for name, repeats in (("repeat", True), ("explore", False)):
    settings.register_profile(
        name, derandomize=repeats, print_blob=not repeats, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
settings.load_profile("repeat")

if not torch.cuda.is_available():
    # Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.interpreter  # noqa: F401


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="module", autouse=True)
def exempt_what_is_there_from_collection():
    """Exempt from garbage collection what a file finds imported, compiled and cached.

    Each run of training collects at its end. Going through some millions of objects that live until
    the end takes as long as two iterations.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def restore_determinism():
    """Turn off deterministic algorithms, which --deterministic-mode turns on, after a test."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def server():
    """Start the server of processes where there is no GPU: CUDA does not survive a fork.

    Test files have been imported by then, and have changed nothing.
    """
    if not torch.cuda.is_available():
        processes.start_server()


@pytest.fixture(scope="session")
def start_script():
    """``processes.start_script`` without its context."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    return partial(processes.start_script, context)


@pytest.fixture(scope="session")
def run_ranks(start_script, tmp_path_factory):
    """Runs a test file that is its own worker, a process for each rank.

    It is told its rank last, and in the environment as by torchrun, with a store for rendezvous.
    """

    def run(
        script: str | Path, ranks: int, *arguments: object, timeout: float, **environment: str
    ) -> None:
        folder = tmp_path_factory.mktemp("ranks")
        _store, addresses = processes.rendezvous()
        environment |= addresses | {
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": folder.name,
        }  # fmt: skip
        outputs = [folder / f"{rank}.txt" for rank in range(ranks)]
        workers = [
            start_script(
                script, *arguments, rank, output=output,
                RANK=str(rank), LOCAL_RANK=str(rank), **environment,
            )
            for rank, output in enumerate(outputs)
        ]  # fmt: skip
        codes = processes.finish(workers, timeout)
        texts = [output.read_text() for output in outputs]
        # Of each, its traceback: what CUDA says while a process ends is longer.
        shown = "\n".join(text[text.find("Traceback") :][:3000] for text in texts)
        assert not any(codes), f"exit codes {codes}: {shown}"

    return run


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def write_dataset():
    """Writes documents of consecutive token ids; it returns the dataset's prefix."""
    import megatron_lowbit.cpu_runtime  # noqa: F401  before megatron

    # isort: split
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def write(prefix, lengths=(25,) * 40, first_token=0, dtype=np.uint16) -> str:
        builder, begin = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype), 0
        for length in lengths:
            builder.add_document(first_token + np.arange(begin, begin + length) % 990, [length])
            begin += length
        builder.finalize(f"{prefix}.idx")
        return str(prefix)

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


@pytest.fixture
def file_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Give a context in which no file can grow beyond a number of bytes, as on a full disk."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


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
