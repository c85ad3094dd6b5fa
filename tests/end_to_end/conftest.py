"""Fixtures with a tiny dataset, and three ways to run pretrain_gpt.py on it."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds no paths

from tiny_run import (
    ROOT,
    Result,
    arguments_for,
    launch,
    run_script,
    without_pictures,
    write_corpus,
)

from megatron_lowbit.errors import exit_on_user_error

RANK = Path(__file__).with_name("rank_of_runs.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Folder with ``data.bin``, ``data.idx`` and ``tokenizer/``."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def memory() -> dict:
    """Folders of the runs so far."""
    return {}


@pytest.fixture
def pretrain_here(corpus, capsys):
    """Function that runs a script's main in this process, which is seconds faster."""

    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            exit_on_user_error(partial(run_script, arguments_for(corpus, arguments)))
        captured = capsys.readouterr()
        return Result(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def pretrain_command(corpus):
    """Function that runs pretrain_gpt.py as a command, in one process or by torchrun."""

    def run(*arguments: object, processes: int = 1) -> subprocess.CompletedProcess:
        launcher = [*TORCHRUN, str(processes)] if processes > 1 else [sys.executable]
        command = [*launcher, str(ROOT / "pretrain_gpt.py"), *arguments_for(corpus, arguments)]
        return launch(command)

    return run


@pytest.fixture
def pretrain_ranks(corpus, tmp_path):
    """Function of {name: arguments} that makes several runs in the same processes.

    It returns the folder of NAME.RANK.pt, the amax histories of each rank; see ``tiny_run``.
    Exactly the runs named in ``refused`` must be refused, on all ranks.
    """

    def run(runs: dict[str, tuple], refused: tuple[str, ...] = (), processes: int = 2) -> Path:
        folder = tmp_path / f"{processes}-ranks"
        folder.mkdir()
        job = {name: arguments_for(corpus, arguments) for name, arguments in runs.items()}
        (folder / "job.json").write_text(json.dumps(job))
        command = [*TORCHRUN, str(processes), str(RANK), str(folder / "job.json")]
        result = launch(command)
        said = [line for line in result.stderr.splitlines() if "Error" in line]
        assert result.returncode == 0, "\n".join(said[:20])
        errors = {path.name: path.read_text() for path in folder.glob("*.error")}
        expected = {f"{name}.{rank}.error" for name in refused for rank in range(processes)}
        assert set(errors) == expected, errors
        return folder

    return run
