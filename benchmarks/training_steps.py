"""Train a case of a benchmark in processes of its own, and read figures from Megatron-LM's log."""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lowbit.analysis.machine import machine

ROOT = Path(__file__).parents[1]
OURS, HYBRID, UPSTREAM = "pretrain_gpt.py", "pretrain_hybrid.py", "examples/own_script.py"
"""Training scripts; the last is Megatron-LM itself unless its arguments name a recipe."""
GRAPHS = "--cuda-graph-impl local"
BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"
PADDED = "--moe-router-padding-for-quantization"
SETTLED = 6
"""Steps left out of medians: compilation, caches and the allocator."""
PATIENCE_S = 300

_STEP = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r"iteration +(\d+)/.*lm loss: ([\d.E+-]+|nan)")
_THROUGHPUT = re.compile(r"iteration +(\d+)/.*throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)")
_MEMORY = re.compile(r"\[Rank (\d+)\].*? max allocated: ([\d.]+)")
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|error|Exception): .*)", re.M)
_PACKAGES = ("megatron-core", "transformer-engine")


class Log(NamedTuple):
    """Figures of Megatron-LM's log.

    ``milliseconds``, ``losses`` and ``tflops`` (TFLOP/s of a GPU, by Megatron-LM's formula, empty
    without ``--log-throughput``) are by iteration, ``memory_gib`` is the most GiB that PyTorch had
    allocated, by rank: Megatron-LM prints that of the first data-parallel ranks.
    """

    milliseconds: dict[int, float]
    losses: dict[int, float]
    tflops: dict[int, float]
    memory_gib: dict[int, float]


def read_log(output: str) -> Log:
    """Read the figures of a run's output."""
    steps, losses, tflops = (
        {int(iteration): float(value) for iteration, value in pattern.findall(output)}
        for pattern in (_STEP, _LOSS, _THROUGHPUT)
    )
    memory = {int(rank): float(mebibytes) / 1024 for rank, mebibytes in _MEMORY.findall(output)}
    return Log(steps, losses, tflops, {rank: round(memory[rank], 2) for rank in sorted(memory)})


def settled(figures: dict[int, float]) -> list[float]:
    """Return the figures of the settled steps; of all steps where none has settled."""
    return [x for i, x in figures.items() if i > SETTLED] or list(figures.values())


def recipe(name: str) -> str:
    """Return the argument that selects a recipe."""
    return f"--precision-recipe {name}"


def training_command(script: str, words: Sequence[str], gpus: int) -> str:
    """Return what ``train`` does as a line for a shell in the repository's root."""
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(gpus)]
    variables = [f"{name}={value}" for name, value in _variables(words).items()]
    return shlex.join([*variables, *launcher, script, *words])


def train(
    script: str,
    words: Sequence[str],
    gpus: int,
    device: int | None = None,
    patience: float = PATIENCE_S,
) -> dict[str, Any]:
    """Train once.

    Args:
        script: one of the training scripts, relative to the repository's root.
        words: its arguments.
        gpus: number of processes, with a GPU each.
        device: the one GPU that the processes see; None for all.
        patience: seconds after which the run is stopped.

    Returns:
        The median and the fastest settled step, the losses and the seconds of the whole process;
        TFLOP/s of a GPU and peak GiB where the log has them. For a run that fails, its error alone.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        **_variables(words),
    }
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *launcher, script, *words], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {patience} s"}
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then ends its ranks, which would keep the GPU
            process.wait()
    if process.returncode:
        return {"error": _error_of(errors)}
    return _row(read_log(output)) | {"wall_s": round(time.monotonic() - begin, 1)}


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that Megatron-LM wants of layouts other than FSDP."""
    return {} if "--use-megatron-fsdp" in words else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _error_of(output: str) -> str:
    found = [line for line in _ERROR.findall(output) if "ChildFailed" not in line]
    return (found or output.splitlines() or ["no output"])[0][:500]


def _row(log: Log) -> dict[str, Any]:
    if not log.milliseconds:
        return {"error": "the log has no iteration"}
    steps = settled(log.milliseconds)
    row: dict[str, Any] = {
        "median_ms": round(statistics.median(steps), 1),
        "fastest_ms": min(steps),
    }
    if log.tflops:
        row["tflop_per_s"] = round(statistics.median(settled(log.tflops)), 1)
    if log.memory_gib:
        row["peak_gib"] = max(log.memory_gib.values())
    return row | {"losses": log.losses}


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a benchmark's file, none where it does not exist."""
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def write_rows(file: Path, rows: Sequence[dict[str, Any]], gpus: int, **more: Any) -> None:
    """Write rows into a benchmark's file, with the machine; ``more`` goes between them."""
    installed = {distribution.name.replace("_", "-") for distribution in distributions()}
    versions = {name: version(name) for name in _PACKAGES if name in installed}
    hardware = {**machine(), "gpus": gpus, **versions}
    file.write_text(json.dumps({"machine": hardware, **more, "rows": rows}, indent=1) + "\n")
