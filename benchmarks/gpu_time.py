"""GPU time of whole training steps by kind of kernel: where a step's milliseconds go.

    python -m benchmarks gpu_time --only "llama-8b fp8-tile" "llama-8b Megatron-LM" \\
        --output benchmarks/results/gpu-time-h100.json

Trains cases of flagship.py with Megatron-LM's own profiling arguments and adds up the kernels of
two settled steps, by the operators that launch them and by their names. A step is busy as long as
any kernel or copy runs. Profiling slows the CPU down: compare the busy time with the step's median
in flagship.py, not with the profiled step. What is left there is time in which the GPU waits.
"""

import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import training_steps
from benchmarks.flagship import Case, cases, words_of
from benchmarks.runner import table
from benchmarks.training_steps import run_cases, train
from megatron_lowbit.analysis.machine import machine

FIRST, LAST = 10, 12
"""Steps that are profiled: from the first up to the last, which is not."""
OPERATORS = {
    "loss": re.compile("cross_?entropy|vocab_?parallel_?ce", re.I),
    "embedding": re.compile("embedding", re.I),
    # Data parallelism adds gradients to main gradients in a hook of these.
    "main gradients": re.compile("AccumulateGrad"),
}
"""Kinds of kernels by the name of an operator that launches them, or by their own."""
KINDS = {
    "attention": re.compile(r"\b(sdpa|fmha|flash|attention)\b"),
    "optimizer": re.compile(r"\b(multi tensor|adam)\b"),
    "amaxes": re.compile(r"\bamax\b"),
    "GEMMs": re.compile(r"gemm|\b(nvjet|cutlass|xmma|cublas|grouped kernel|stacked kernel)\b"),
    "SwiGLU": re.compile(r"\bd?(swiglu|silu)\b"),
    # Transformer Engine's unary_kernel casts, and its transposes are of FP8 operands. The last ones
    # are kernels of delayed scaling and of split means.
    "quantization": re.compile(
        r"\b(de|re)?quantize|\b(block scaled|cast|decode kernel|unary kernel|transpose|rht|hadamard"
        r"|record kernel|recompute kernel|sums kernel)\b"
    ),
    "norms": re.compile(r"norm\b|\bnormalization\b"),
}
"""Other kinds by the words of a kernel's name, the first that fits; the rest are others.

Words end at underscores, not at capitals: LoadWithCast and gpu_kernel_impl_nocast are torch's
elementwise kernels. Most of these have nothing that tells what they are for.
"""
OTHERS = "others"
LONGEST = 24
"""Kernels that a row names."""
_COLUMNS = ("busy", *OPERATORS, *KINDS, OTHERS)
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel of this name."""
    words = re.sub(r"[\W_]+", " ", kernel).lower()
    return _first(OPERATORS, kernel) or _first(KINDS, words) or OTHERS


def _first(kinds: Mapping[str, re.Pattern[str]], name: str) -> str | None:
    return next((kind for kind, names in kinds.items() if names.search(name)), None)


def milliseconds(trace: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds per step of each kind of kernel, and of any ("busy").

    Args:
        trace: what torch.profiler exports, with times in microseconds.

    Raises:
        ValueError: the trace has no whole step, or nothing that ran on a GPU.
    """
    kernels, steps = _kernels(trace)
    sums = Counter(
        {"busy": _union((kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in kernels)}
    )
    launched = _launched_by_operators(trace)
    for kernel in kernels:
        kind = launched.get(_correlation(kernel)) or kind_of(kernel["name"])
        sums[kind] += kernel["dur"]
    return {kind: round(sums[kind] / steps / 1e3, 2) for kind in _COLUMNS}


def _launched_by_operators(trace: dict[str, Any]) -> dict[int | None, str]:
    """Return the kind of each correlation whose launch lies within one of OPERATORS.

    Operators and launches of a thread are nested, so that an operator holds what begins before it
    ends. A CUDA graph is one launch of many kernels.
    """
    events = [x for x in trace["traceEvents"] if x.get("cat") in ("cpu_op", *_LAUNCHES)]
    ends: dict[tuple[int, int, str], float] = {}
    launched: dict[int | None, str] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        begin, thread = event["ts"], (event["pid"], event["tid"])
        if event["cat"] in _LAUNCHES:
            inside = (kind for kind in OPERATORS if begin < ends.get((*thread, kind), 0.0))
            if kind := next(inside, None):
                launched[_correlation(event)] = kind
        elif kind := _first(OPERATORS, event["name"]):
            end = ends.get((*thread, kind), 0.0)
            ends[*thread, kind] = max(end, begin + event["dur"])
    return launched


def _correlation(event: dict[str, Any]) -> int | None:
    """Return the number that a launch and its kernels share."""
    return event.get("args", {}).get("correlation")


def longest(trace: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds per step of the longest kernels, by the start of their names."""
    kernels, steps = _kernels(trace)
    sums: Counter[str] = Counter()
    for kernel in kernels:
        sums[kernel["name"][:120]] += kernel["dur"]
    return {name: round(sum_ / steps / 1e3, 2) for name, sum_ in sums.most_common(LONGEST)}


def _kernels(trace: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Return the kernels and copies on the GPU, and the number of steps."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    kernels = [event for event in events if event.get("cat") in _ON_GPU]
    if not steps or not kernels:
        raise ValueError(f"the trace has {len(steps)} steps and {len(kernels)} kernels")
    return kernels, len(steps)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that the spans cover together."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def profile(case: Case, gpus: str | None) -> dict[str, Any]:
    """Train a case under the profiler; return the row of its first rank."""
    with tempfile.TemporaryDirectory() as folder:
        board = Path(folder) / "tensorboard"
        board.mkdir()
        words = [
            *words_of(case, LAST), "--tensorboard-dir", str(board), "--profile",
            "--use-pytorch-profiler", "--profile-step-start", str(FIRST), "--profile-step-end",
            str(LAST),
        ]  # fmt: skip
        row = train(case.script, words, case.gpus, gpus)
        if "error" in row:
            return row
        with gzip.open(Path(folder) / "torch_profile" / "rank-0.json.gz", "rt") as file:
            trace = json.load(file)
    return {
        "commit": machine()["commit"],
        "milliseconds": milliseconds(trace),
        "longest": longest(trace),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Train the cases that the output lacks under the profiler; write the file after each."""
    parser = training_steps.cases_parser(__doc__, seconds=1e9, only=True)
    training_steps.add_gpus(parser)
    args = parser.parse_args(argv)
    fitting = {case.name: case for case in cases() if case.gpus <= len(args.gpus)}
    rows = run_cases(fitting, profile, args, len(args.gpus), args.gpus)
    columns = {kind: f"milliseconds.{kind}" for kind in _COLUMNS}
    Console(width=150).print(table(rows, "GPU time of a step, ms", columns, name="case"))
