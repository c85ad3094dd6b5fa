"""Cost of emulating NVFP4 on a CPU: iteration time over the FP32 iteration's, in one run.

    python -m benchmarks cpu_iteration --data-path data/stdlib --tokenizer-model data/tokenizer

Trains examples/gpt-7m-cpu.args for a few iterations with each setting, in turns, so that a slow
minute of the machine hits all of them, and writes medians over the iterations after the first ones
(compilation) to benchmarks/results/cpu_iteration.json.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch

from benchmarks import records
from benchmarks.training_steps import OURS, ROOT, train_here

WARMUP, MEASURED, ROUNDS = 4, 10, 3
TOKENS = 1024
SETTINGS = {
    "fp32": "--precision-recipe bf16",
    "nvfp4": "--precision-recipe nvfp4",
    "nvfp4, every block": "--precision-recipe nvfp4 --recipe-set bf16_blocks=none",
    "nvfp4, reference engine": "--precision-recipe nvfp4 --quantization-engine reference",
}


def iteration_seconds(setting: str, data: Sequence[str]) -> list[float]:
    """Measure the seconds of each iteration of one run."""
    length = f"--train-iters {WARMUP + MEASURED} --lr-decay-iters 1000"
    words = f"@{ROOT}/examples/gpt-7m-cpu.args {length} --log-interval 1 --eval-iters 1 {setting}"
    entries = train_here(OURS, [*words.split(), *data])
    # The last entry of an iteration counts: it may be logged again with its validation.
    speeds = {entry["iteration"]: entry["tokens_per_second"] for entry in entries}
    return [TOKENS / speed for iteration, speed in speeds.items() if iteration > WARMUP]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = records.parser(__doc__)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--tokenizer-model", required=True)
    args = parser.parse_args(argv)
    data = ["--data-path", args.data_path, "--tokenizer-model", args.tokenizer_model]
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, setting in SETTINGS.items():
            times[name] += iteration_seconds(setting, data)
    fp32 = statistics.median(times["fp32"])
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        quartiles = [round(q, 4) for q in statistics.quantiles(seconds, n=4)]
        row = {"setting": name, "median_s": round(median, 4), "quartiles_s": quartiles}
        rows.append(row | {"iterations": len(seconds), "over_fp32": round(median / fp32, 3)})
        print(f"{name:26} {median * 1e3:7.0f} ms  {median / fp32:.2f} x FP32")
    head = {"machine": records.description(threads=torch.get_num_threads())}
    records.write(records.RESULTS / "cpu_iteration.json", head, rows=rows)
