"""Runs of pretrain_gpt.py on a tiny model: their command line, and what they leave behind.

As a script it is one rank of a torchrun job that makes several runs one after another; see
``main``. Most of the time of a run of its own would go into importing torch.
"""

import json
import os
import random
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.dist_checkpointing import load_tensors_metadata
from torch.distributed.checkpoint import FileSystemReader, load

import pretrain_gpt
import pretrain_hybrid
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.amax_history import PREFIX
from megatron_lowbit.megatron.layer_state import layer_states
from megatron_lowbit.training import loop
from megatron_lowbit.training.checkpoint import TRACKER
from megatron_lowbit.data.corpus import preprocess
from megatron_lowbit.data.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[2]
# One thread: a tiny model gains nothing from more, and waits for them on a busy machine.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
MODEL = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 128 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 100
    --split 90,10,0 --eval-iters 1 --log-interval 1 --quantization-engine reference
""")

HYBRID = ("--hybrid-override-pattern", "M-M*-M-M", "--num-layers", 8, "--mamba-state-dim", 16,
          "--mamba-head-dim", 8, "--mamba-num-groups", 4, "--position-embedding-type",
          "none")  # fmt: skip

Histories = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """What a finished run left: the fields of subprocess.CompletedProcess that tests read."""

    returncode: int
    stdout: str
    stderr: str


def write_corpus(folder: Path) -> None:
    """``data.bin``, ``data.idx`` and ``tokenizer/``, from sentences of made-up words."""
    generator = random.Random(0)
    words = ["".join(generator.choices("aeioubdfklmnprst", k=6)) for _ in range(300)]
    weights = [1 / rank for rank in range(1, 301)]
    texts = [" ".join(generator.choices(words, weights, k=2000)) for _ in range(20)]
    files = [folder / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    assert train_tokenizer(texts, 512, folder / "tokenizer") == 512
    preprocess(files, str(folder / "tokenizer"), str(folder / "data"))


def arguments_for(corpus: Path, extra: tuple) -> list[str]:
    """The tiny model on the tiny data, and then ``extra``."""
    data = ["--data-path", str(corpus / "data"), "--tokenizer-model", str(corpus / "tokenizer")]
    return [*MODEL, *data, *map(str, extra)]


def run_script(arguments: list[str]) -> None:
    """The main of the script that a user would give these arguments."""
    script = pretrain_hybrid if HYBRID[0] in arguments else pretrain_gpt
    sys.argv = [script.__file__, *arguments]
    script.main()


def done(result) -> None:
    """Check that a run ended well."""
    assert result.returncode == 0, result.stderr[-3000:]


def refused(result) -> str:
    """The one error line of a command that must have been refused."""
    assert result.returncode == 2, result.stderr[-2000:]
    errors = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(errors) == 1, errors
    assert errors[0].startswith("error: ")
    return errors[0]


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """Training loss by iteration."""
    return {m["iteration"]: m["lm_loss"] for m in metrics(folder) if "lm_loss" in m}


def steps(folder: Path) -> dict[int, tuple[float, float]]:
    """(training loss, gradient norm) by iteration."""
    return {
        m["iteration"]: (m["lm_loss"], m["grad_norm"]) for m in metrics(folder) if "lm_loss" in m
    }


def start_from(source: Path, iteration: int, folder: Path) -> Path:
    """A new run's folder whose newest checkpoint is one of another run's."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(source / name, folder / name)
    (folder / TRACKER).write_text(str(iteration))
    return folder


def saved_histories(checkpoint: Path) -> Histories:
    """The amax histories in a checkpoint, by layer."""
    stored = load_tensors_metadata(str(checkpoint))
    tensors = {
        key: torch.zeros(tensor.global_shape)
        for key, tensor in stored.items()
        if key.startswith(PREFIX)
    }
    load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}


@contextmanager
def recorded_histories() -> Iterator[dict[int, Histories]]:
    """While runs are made: this rank's amax histories after each number of iterations."""
    recorded: dict[int, Histories] = {}
    original = loop.train_step

    def train_step(args, iteration, batches, model, *rest, **options):
        recorded.setdefault(iteration, _histories(model))
        result = original(args, iteration, batches, model, *rest, **options)
        recorded[iteration + 1] = _histories(model)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        yield recorded


def _histories(model: list) -> Histories:
    return {
        state.plan.layer.path: state.amax_history.entries.clone().cpu()
        for state in layer_states(model)
        if state.amax_history is not None
    }


def main() -> None:
    """Make every run of a JSON file {name: arguments}; leave NAME.RANK.pt: its histories.

    Of a run that is refused, NAME.RANK.error: the message.
    """
    job, rank = Path(sys.argv[1]), os.environ["RANK"]
    for name, arguments in json.loads(job.read_text()).items():
        with recorded_histories() as recorded:
            try:
                run_script(arguments)
            except UserError as error:
                (job.parent / f"{name}.{rank}.error").write_text(str(error))
        torch.save(recorded, job.parent / f"{name}.{rank}.pt")


if __name__ == "__main__":
    main()
