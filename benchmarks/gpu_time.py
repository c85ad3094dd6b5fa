"""GPU time of whole training steps by kind of kernel: where a step's milliseconds go.

    python -m benchmarks gpu_time --only "llama-8b fp8-tile" "llama-8b Megatron-LM" \\
        --output benchmarks/results/gpu-time-h100.json

Trains cases of flagship.py with Megatron-LM's own profiling arguments and adds up the kernels of
two settled steps. A step is busy as long as any kernel or copy runs. Profiling slows the CPU down:
compare the busy time with the step's median in flagship.py, not with the profiled step. What is
left there is time in which the GPU waits.
"""

import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import training_steps
from benchmarks.flagship import Case, cases, words_of
from benchmarks.runner import table
from benchmarks.training_steps import run_cases, train

FIRST, LAST = 10, 12
"""Steps that are profiled: from the first up to the last, which is not."""
KINDS = {
    "attention": re.compile(r"sdpa|fmha|flash|attention", re.I),
    "optimizer": re.compile(r"multi_tensor|adam", re.I),
    "amaxes": re.compile(r"amax", re.I),
    "GEMMs": re.compile(r"gemm|nvjet|cutlass|xmma|cublas", re.I),
    # LoadWithCast is an operand of torch's elementwise kernels.
    "quantization": re.compile(
        r"quantize|block_scaled|(?<!with)cast|decode_kernel|rht|hadamard", re.I
    ),
    "norms": re.compile(r"norm", re.I),
}
"""Kinds of kernels by their names, the first that fits; others are elementwise and the rest."""
OTHERS = "others"
LONGEST = 24
"""Kernels that a row names."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel of this name."""
    return next((kind for kind, names in KINDS.items() if names.search(kernel)), OTHERS)


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
    for kernel in kernels:
        sums[kind_of(kernel["name"])] += kernel["dur"]
    return {kind: round(sums[kind] / steps / 1e3, 2) for kind in ("busy", *KINDS, OTHERS)}


def longest(trace: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds per step of the longest kernels, by the start of their names."""
    kernels, steps = _kernels(trace)
    sums: Counter[str] = Counter()
    for kernel in kernels:
        sums[kernel["name"][:120]] += kernel["dur"]
    return {name: round(sum_ / steps / 1e3, 2) for name, sum_ in sums.most_common(LONGEST)}


def _kernels(trace: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Return what ran on the GPU, and in how many steps."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    kernels = [event for event in events if event.get("cat") in _ON_GPU]
    if not steps or not kernels:
        raise ValueError(f"the trace has {len(steps)} steps and {len(kernels)} kernels")
    return kernels, len(steps)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much of the time the spans cover together."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def profile(case: Case, gpu: str | None) -> dict[str, Any]:
    """Train a case under the profiler; return its row."""
    with tempfile.TemporaryDirectory() as folder:
        board = Path(folder) / "tensorboard"
        board.mkdir()
        words = [
            *words_of(case, LAST), "--tensorboard-dir", str(board), "--profile",
            "--use-pytorch-profiler", "--profile-step-start", str(FIRST), "--profile-step-end",
            str(LAST),
        ]  # fmt: skip
        row = train(case.script, words, gpus=1, device=gpu)
        if "error" in row:
            return row
        with gzip.open(Path(folder) / "torch_profile" / "rank-0.json.gz", "rt") as file:
            trace = json.load(file)
        return {"milliseconds": milliseconds(trace), "longest": longest(trace)}


def main(argv: Sequence[str] | None = None) -> None:
    """Train the cases that the output lacks under the profiler; write the file after each."""
    parser = training_steps.cases_parser(__doc__, seconds=1e9, only=True)
    parser.add_argument("--gpu", type=int, metavar="N", help="number of the GPU (default: first)")
    args = parser.parse_args(argv)
    rows = run_cases({case.name: case for case in cases()}, profile, args, 1, [args.gpu])
    columns = {kind: f"milliseconds.{kind}" for kind in ("busy", *KINDS, OTHERS)}
    Console(width=150).print(table(rows, "GPU time of a step, ms", columns, name="case"))
