"""Runs of the pretraining scripts on a tiny model: command lines and results."""

import json
import os
import random
import shlex
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron_lowbit.data.preprocess import preprocess
from megatron_lowbit.data.tokenizer import train_tokenizer
from megatron_lowbit.errors import UserError, exit_on_user_error
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.features.amax_history import PREFIX
from megatron_lowbit.megatron.layers.state import layer_states
from megatron_lowbit.megatron.run.steps import steps_of
from megatron_lowbit.storage.files import TRACKER
from tests.short_runs import hooked_runs, saved_tensors, without_pictures
from tests.short_runs import losses as losses
from tests.short_runs import metrics as metrics
from tests.short_runs import steps as steps

ROOT = Path(__file__).parents[2]
# More threads would slow a tiny model down on a busy machine.
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
MODEL = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --max-position-embeddings 32 --hidden-dropout 0
    --attention-dropout 0
""")
ONE_MICROBATCH = ("--global-batch-size", 2)
"""Half the work of a step, for what does not depend on how gradients add up."""
OTHER_RECIPE = ("--resume-changed", "recipe")
"""For a run that resumes with another recipe than the checkpoint's."""
FULL_RECOMPUTATION = ("--recompute-granularity", "full", "--recompute-method", "uniform",
                      "--recompute-num-layers", 1)  # fmt: skip
GROUPED = ("--group-query-attention", "--num-query-groups", "2")
# The schedule and the interval of saves do not depend on the number of iterations.
LOOP = shlex.split("""
    --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 100
    --split 90,10,0 --eval-iters 0 --eval-interval 100 --log-interval 1 --save-interval 100
    --override-opt-param-scheduler --num-workers 0 --quantization-engine reference
    --tokenizer-type HuggingFaceTokenizer
""")
LATENT = ("--multi-latent-attention", "--q-lora-rank", 32, "--kv-lora-rank", 32, "--qk-head-dim",
          16, "--qk-pos-emb-head-dim", 8, "--v-head-dim", 16)  # fmt: skip
HYBRID = ("--hybrid-layer-pattern", "M-M*-M-M", "--mamba-state-dim", 16, "--mamba-head-dim", 8,
          "--mamba-num-groups", 4, "--position-embedding-type", "none")  # fmt: skip

Histories = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """Result of a finished run, with fields of subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


def write_corpus(folder: Path) -> None:
    """Write ``data.bin``, ``data.idx`` and ``tokenizer/`` for random text."""
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
    """Return arguments of the tiny model and data, followed by ``extra``.

    A hybrid's pattern replaces the number of layers, latent attention replaces groups of queries,
    and --mock-data replaces the data.
    """
    attention = () if LATENT[0] in extra else GROUPED
    data = [] if "--mock-data" in extra else ["--data-path", str(corpus / "data")]
    data += ["--tokenizer-model", str(corpus / "tokenizer")]
    found = [*MODEL, *attention, *LOOP, *data, *map(str, extra)]
    return found[2:] if HYBRID[0] in found else found


def run_script(arguments: list[str]) -> None:
    """Run the main function of the script that suits the arguments."""
    pretrain.main(arguments, hybrid=HYBRID[0] in arguments)


def done(result) -> None:
    """Check that a run succeeded."""
    assert result.returncode == 0, result.stderr[-3000:]


def refused(result) -> str:
    """Return the only error line of a command, which must have been refused."""
    assert result.returncode == 2, result.stderr[-2000:]
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr[-2000:]
    assert result.stderr.rstrip().splitlines()[-1] == errors[0]
    assert "Traceback" not in result.stderr
    return errors[0]


def start_from(source: Path, iteration: int, folder: Path) -> Path:
    """Copy a checkpoint into the folder of a new run, as its newest one."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(source / name, folder / name)
    (folder / TRACKER).write_text(str(iteration))
    return folder


def check_same_tensors(folder: Path, other: Path, iteration: int) -> None:
    """Check that two runs' checkpoints of an iteration have the same tensors, to the bit."""
    tensors, expected = (saved_tensors(run / f"iter_{iteration:07d}") for run in (folder, other))
    assert tensors.keys() == expected.keys() and tensors
    for key, tensor in tensors.items():
        assert torch.equal(tensor, expected[key]), key


def saved_histories(checkpoint: Path) -> Histories:
    """Return the amax histories in a checkpoint, by layer."""
    found = saved_tensors(checkpoint, PREFIX)
    return {key.removeprefix(PREFIX): tensor for key, tensor in found.items()}


@contextmanager
def recorded_histories() -> Iterator[dict[int, Histories]]:
    """Record this rank's amax histories at the beginning of each iteration, inside the context."""
    recorded: dict[int, Histories] = {}

    def watch(chunks: list, args: Namespace) -> None:
        def record(iteration: int, training: bool) -> None:
            if training:
                recorded[iteration] = {
                    state.plan.layer.path: state.amax_history.entries.clone().cpu()
                    for state in layer_states(chunks)
                    if state.amax_history is not None
                }

        steps_of(args, chunks).listeners.append(record)

    with hooked_runs(watch):
        yield recorded


def run_alone(arguments: list[str]) -> None:
    """Run the script that suits the arguments as this process's command, without a picture."""
    with without_pictures():
        exit_on_user_error(partial(run_script, arguments))


def make_runs(job: Path) -> None:
    """Make every run of a JSON file {name: arguments}; write its histories to NAME.RANK.pt.

    NAME.RANK.error has the message of a run that is refused.
    """
    rank = os.environ["RANK"]
    with without_pictures():
        for name, arguments in json.loads(job.read_text()).items():
            with recorded_histories() as recorded:
                try:
                    run_script(arguments)
                except UserError as error:
                    (job.parent / f"{name}.{rank}.error").write_text(str(error))
            torch.save(recorded, job.parent / f"{name}.{rank}.pt")
