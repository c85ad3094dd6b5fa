"""Whole training steps: cases in processes of their own, and figures of Megatron-LM's log."""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any, NamedTuple

import torch
import yaml

from benchmarks import records, timing
from benchmarks.records import ROOT
from megatron_lowbit.planning.training_arguments import TrainingArguments

OURS, HYBRID, UPSTREAM = "pretrain_gpt.py", "pretrain_hybrid.py", "examples/own_script.py"
"""Training scripts; the last is Megatron-LM itself unless its arguments name a recipe."""
SETTLED = 6
"""Steps omitted from medians: compilation, caches and the allocator."""
PATIENCE_S = 300
_OP_FUSER = "--use-transformer-engine-op-fuser"
_SWITCHES = {
    _OP_FUSER: "NVTE_CUTEDSL_FUSED_GROUPED_MLP",
    "--moe-single-grouped-weight": "NVTE_GROUPED_LINEAR_SINGLE_PARAM",
}
"""Environment variables without which arguments are refused or have no effect."""

_STEP = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r"iteration +(\d+)/.*lm loss: ([\d.E+-]+|nan)")
_THROUGHPUT = re.compile(r"iteration +(\d+)/.*throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)")
_MEMORY = re.compile(r"\[Rank (\d+)\].*? max allocated: ([\d.]+)")
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|error|Exception): .*)", re.M)


class Log(NamedTuple):
    """Figures of Megatron-LM's log.

    ``milliseconds``, ``losses`` and ``tflops`` (TFLOP/s of a GPU, by Megatron-LM's formula, empty
    without ``--log-throughput``) are by iteration, ``memory_gib`` is the peak that PyTorch had
    allocated, by rank: Megatron-LM prints it for the first data-parallel ranks.
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


def _settled(figures: dict[int, float]) -> list[float]:
    """Return the figures of the settled steps; of all steps where none has settled."""
    return [x for i, x in figures.items() if i > SETTLED] or list(figures.values())


def figures_of(log: Log) -> dict[str, Any]:
    """Return a run's row: times and losses, rates and memory where the log has them."""
    if not log.milliseconds:
        return {"error": "the log has no iteration"}
    steps = _settled(log.milliseconds)
    row: dict[str, Any] = {
        "median_ms": round(statistics.median(steps), 1),
        "fastest_ms": min(steps),
    }
    if log.tflops:
        row["tflop_per_s"] = round(statistics.median(_settled(log.tflops)), 1)
    if log.memory_gib:
        row["memory_gib"] = list(log.memory_gib.values())
        row["peak_gib"] = max(row["memory_gib"])
    return row | {"losses": log.losses}


def cases_file(name: str) -> dict[str, Any]:
    """Return the declarations of benchmarks/cases/NAME.yaml."""
    return yaml.safe_load((ROOT / "benchmarks" / "cases" / f"{name}.yaml").read_text())


def from_root(words: Sequence[str]) -> list[str]:
    """Return arguments with files of examples by their whole path."""
    return [word.replace("@examples", f"@{ROOT}/examples") for word in words]


def tokens_of(words: Sequence[str]) -> int:
    """Return the tokens of a step."""
    flags = TrainingArguments(from_root(words)).flags
    return flags.global_batch_size * flags.seq_length


def training_command(script: str, words: Sequence[str], gpus: int) -> str:
    """Return ``train`` as a command line for the repository's root."""
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(gpus)]
    variables = [f"{name}={value}" for name, value in _variables(words).items()]
    return shlex.join([*variables, *launcher, script, *words])


def train(
    script: str,
    words: Sequence[str],
    gpus: int,
    device: str | int | None = None,
    patience: float = PATIENCE_S,
) -> dict[str, Any]:
    """Train once.

    Args:
        script: one of the training scripts, relative to the repository's root.
        words: its arguments.
        gpus: number of processes, with a GPU each.
        device: the GPUs that the processes see, such as "0,1"; None for all.
        patience: seconds after which the run is stopped.

    Returns:
        The median and the fastest settled step, the losses and the seconds of the whole process;
        TFLOP/s of a GPU and peak GiB where the log has them. For a run that fails, or would take
        another path than its arguments ask for, only the error.
    """
    if refused := _one_by_one(words):
        return {"error": refused}
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
        causes = [line for line in _ERROR.findall(errors) if "ChildFailed" not in line]
        return {"error": (causes or errors.splitlines() or ["no output"])[0][:500]}
    return figures_of(read_log(output)) | {"wall_s": round(time.monotonic() - begin, 1)}


def _one_by_one(words: Sequence[str]) -> str | None:
    """Return why the op fuser would multiply experts one by one, without an error; None if not."""
    if _OP_FUSER not in words:
        return None
    try:
        from transformer_engine.common.recipe import Float8CurrentScaling
        from transformer_engine.pytorch.ops.basic import is_op_fuser_grouped_tensor_path_supported
    except ImportError as error:
        return timing.reason(error)
    recipe = Float8CurrentScaling() if "tensorwise" in words else None
    if is_op_fuser_grouped_tensor_path_supported(recipe, torch.bfloat16):
        return None
    return f"Transformer Engine has no grouped GEMM for this with cuBLASLt {records.cublaslt()}"


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that Megatron-LM wants with these arguments."""
    parallel = {"--use-megatron-fsdp", "--overlap-moe-expert-parallel-comm"} & {*words}
    variables = {} if parallel else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return variables | {name: "1" for argument, name in _SWITCHES.items() if argument in words}


def train_here(script: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """Train in one process; return the iterations in its metrics.jsonl.

    Raises:
        SystemExit: the run failed.
    """
    with tempfile.TemporaryDirectory() as save:
        command = [sys.executable, str(ROOT / script), *words, "--save", save]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise SystemExit(f"error: the run failed: {shlex.join(command)}")
        return read_metrics(Path(save))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the iterations in a run's metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "lm_loss" in line]


def cases_parser(doc: str | None, seconds: float, only: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of cases, for ``run_cases``."""
    parser = records.parser(doc)
    parser.add_argument(
        "--only", nargs="+", required=only, metavar="PART", help="names of cases, or parts of names"
    )
    parser.add_argument("--repeat", type=int, default=1, help="rows of each case (default: 1)")
    parser.add_argument("--seconds", type=float, default=seconds, help="start no case after these")
    parser.add_argument("--list", action="store_true", help="name the cases that are left, and end")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    return parser


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of the GPUs among which cases are divided."""
    parser.add_argument(
        "--gpu", dest="gpus", type=int, nargs="+", default=[None], metavar="N",
        help="numbers of GPUs, a case on each (default: the first)",
    )  # fmt: skip


def run_cases(
    cases: Mapping[str, Any],
    run: Callable[[Any, str | None], dict[str, Any]],
    args: argparse.Namespace,
    gpus: int,
    devices: Sequence[str | None] = (None,),
    name_of: Callable[[Mapping[str, Any]], str] = lambda row: row["case"],
    **head: Any,
) -> list[dict[str, Any]]:
    """Run the cases that the output lacks, in parallel on different devices.

    The file is written after each. A row that ended well replaces earlier errors of its case.

    Args:
        cases: all cases by name, those that the command line does not name too.
        run: function that makes a case's row, from the case and the devices that it may use.
        args: of ``cases_parser``.
        gpus: number of GPUs, for the record.
        devices: numbers of GPUs, of which a case takes as many as its ``gpus``; None: all of them.
        name_of: the case of a row.
        head: more of the record.
    """
    begin, rows = time.monotonic(), records.read(args.output)
    chosen = [name for name in cases if not args.only or any(
        word == name or (word not in cases and word in name) for word in args.only
    )]  # fmt: skip
    done = Counter(name_of(row) for row in rows if "error" not in row)
    left = [name for turn in range(args.repeat) for name in chosen if done[name] <= turn]
    if args.list:
        print(*left, sep="\n")
        return rows
    free: Queue[str | None] = Queue()
    for device in devices:
        free.put(device)
    taking, keeping = Lock(), Lock()

    def add(name: str) -> bool:
        nonlocal rows
        number = 1 if devices[0] is None else cases[name].gpus
        with taking:  # a case that waits for two devices is not overtaken
            taken = [free.get() for _ in range(number)]
        try:
            if time.monotonic() - begin > args.seconds:
                return False
            row = run(cases[name], None if taken[0] is None else ",".join(map(str, taken)))
        finally:
            for device in taken:
                free.put(device)
        row = {"case": name, "date": date.today().isoformat(), **row}
        with keeping:
            shown = {key: value for key, value in row.items() if key not in _LONG}
            print(shown, flush=True)
            rows = [other for other in rows if name_of(other) != name or "error" not in other]
            rows.append(row)
            records.write(
                args.output, {"machine": records.description(gpus=gpus), **head}, rows=rows
            )
        return True

    with ThreadPoolExecutor(len(devices)) as pool:
        ran = list(pool.map(add, left))
    if not all(ran):
        print(f"{ran.count(False)} cases are left; the same command continues with them")
    return rows


_LONG = ("arguments", "command", "losses", "longest")
"""Parts of a row that are not printed."""
