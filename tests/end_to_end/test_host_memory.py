"""Constant memory of a long run. This file is also the measured process."""

import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_run import ENVIRONMENT, arguments_for

from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.run.steps import steps_of
from tests.short_runs import hooked_runs

COMMON = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", 500,
          "--precision-recipe", "mxfp4", "--recipe-set", "bf16_blocks=none",
          "--quantization-engine", "auto", "--num-layers", 2,
          "--save-keep-last", 2, "--log-interval", 100)  # fmt: skip
ASYNC = ("--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker",
         "--bf16", "--no-gradient-accumulation-fusion")  # fmt: skip


@pytest.mark.slow
def test_memory_stays_flat_for_5000_iterations(tmp_path):
    """The engine is the default one of a CPU, which torch.compile builds."""
    assert growth_of_a_run(tmp_path, 5000, "--save-interval", 100) < 100


@pytest.mark.gpu
def test_memory_stays_flat_with_asynchronous_saves(tmp_path):
    """The run saves 20 times."""
    assert growth_of_a_run(tmp_path, 2000, "--save-interval", 100, *ASYNC) < 5 * 200


def growth_of_a_run(folder: Path, iterations: int, *extra: object) -> float:
    """Return the growth of a run's resident memory in a tenth of its iterations, in KB.

    The median over all tenths but the first: a leak grows in each of them. Single steps are none:
    malloc keeps freed memory, and Python's table of interned strings doubles once, by 3.7 MB.
    """
    given = (*COMMON, "--train-iters", iterations, "--save", folder / "run", *extra)
    command = [sys.executable, __file__, *arguments_for(folder, given)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    resident = json.loads(done.stdout.splitlines()[-1])
    assert len(resident) == iterations
    tenths = [*resident[iterations // 10 :: iterations // 10], resident[-1]]
    print(f"resident KB: {tenths}")
    return statistics.median(end - begin for begin, end in pairwise(tenths))


def worker(arguments: list[str]) -> None:
    """Run, and print the resident memory in KB before each iteration."""
    resident: list[int] = []

    def watch(chunks: list, args: object) -> None:
        steps_of(args, chunks).listeners.append(lambda *_: resident.append(resident_kb()))

    with hooked_runs(watch):
        pretrain.main(arguments, hybrid=False)
    print(json.dumps(resident))


def resident_kb() -> int:
    """Return the resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


if __name__ == "__main__":
    worker(sys.argv[1:])
