"""Fixtures with a tiny dataset, and four ways to run pretrain_gpt.py on it."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds no paths

from tiny_run import ENVIRONMENT, ROOT, Result, arguments_for, run_script, write_corpus

import tests.imported  # noqa: F401  before objects are exempt from garbage collection
from megatron_lowbit.errors import exit_on_user_error
from tests import processes
from tests.short_runs import short_runs  # noqa: F401

SCRIPT = Path(__file__).with_name("run_script.py")
RANKS = 2


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Folder with ``data.bin``, ``data.idx`` and ``tokenizer/``."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


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
def pretrain_forked(corpus, start_script, tmp_path_factory):
    """Function that runs a script's main in another process, which has everything imported.

    Its two streams are one.
    """

    def run(*arguments: object, script: Path = SCRIPT) -> Result:
        output = tmp_path_factory.mktemp("forked") / "output.txt"
        process = start_script(script, *arguments_for(corpus, arguments), output=output)
        (code,) = processes.finish([process], timeout=300)
        return Result(code, output.read_text(), output.read_text())

    return run


@pytest.fixture
def pretrain_command(corpus):
    """Function that runs pretrain_gpt.py, or another script, as a command."""

    def run(
        *arguments: object, script: Path = ROOT / "pretrain_gpt.py"
    ) -> subprocess.CompletedProcess:
        command = [sys.executable, str(script), *arguments_for(corpus, arguments)]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture
def pretrain_ranks(corpus, run_ranks, tmp_path):
    """Function of {name: arguments} that makes several runs in the same two processes.

    It returns the folder of NAME.RANK.pt, the amax histories of each rank; see ``tiny_run``.
    Exactly the runs named in ``refused`` must be refused, on all ranks.
    """

    def run(runs: dict[str, tuple], refused: tuple[str, ...] = ()) -> Path:
        folder = tmp_path / "ranks"
        folder.mkdir()
        job = {name: arguments_for(corpus, arguments) for name, arguments in runs.items()}
        (folder / "job.json").write_text(json.dumps(job))
        run_ranks(SCRIPT, RANKS, folder / "job.json", timeout=300)
        errors = {path.name: path.read_text() for path in folder.glob("*.error")}
        expected = {f"{name}.{rank}.error" for name in refused for rank in range(RANKS)}
        assert set(errors) == expected, errors
        return folder

    return run
