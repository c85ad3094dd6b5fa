"""A tiny dataset and the command line of a tiny GPT, shared by the end-to-end tests."""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401  before megatron

# isort: split
import pretrain_gpt
from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.training.corpus import preprocess
from megatron_lowbit.training.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[2]

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 128 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 100
    --split 90,10,0 --eval-iters 1 --log-interval 1 --quantization-engine reference
""")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with ``data.bin``, ``data.idx`` and ``tokenizer/``, made from the project's code."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = sorted((ROOT / "megatron_lowbit").rglob("*.py"))
    train_tokenizer((path.read_text() for path in sources), 512, folder / "tokenizer")
    preprocess(sources, str(folder / "tokenizer"), str(folder / "data"))
    return folder


@dataclass(frozen=True)
class Result:
    """What a finished run left: the fields of subprocess.CompletedProcess that tests read."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def pretrain_here(corpus, capsys):
    """Runs pretrain_gpt's main in this process: seconds faster, for what needs no new one."""

    def run(*arguments: str) -> Result:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments_for(corpus, arguments)])
            exit_on_user_error(pretrain_gpt.main)
        captured = capsys.readouterr()
        return Result(ended.value.code, captured.out, captured.err)

    return run


def arguments_for(corpus: Path, extra: tuple) -> list[str]:
    """The tiny model on the tiny data, and then ``extra``."""
    data = ["--data-path", str(corpus / "data"), "--tokenizer-model", str(corpus / "tokenizer")]
    return [*MODEL, *data, *map(str, extra)]


@pytest.fixture
def pretrain_command(corpus):
    """Runs pretrain_gpt.py as a command of its own, in one process or by torchrun."""

    def run(*arguments: str, processes: int = 1) -> subprocess.CompletedProcess:
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(processes)]
        command = [*launcher, str(ROOT / "pretrain_gpt.py"), *arguments_for(corpus, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    return run
