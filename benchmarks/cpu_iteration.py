"""Cost of emulating NVFP4 on a CPU: iteration time over the FP32 iteration's, in one run.

    python benchmarks/cpu_iteration.py --data-path data/stdlib --tokenizer-model data/tokenizer

Trains examples/gpt-7m-cpu.args for a few iterations with each setting, in turns, so that a slow
minute of the machine hits all of them, and writes medians over the iterations after the first ones
(compilation) to benchmarks/results/cpu_iteration.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import torch

from megatron_lowbit.analysis.machine import machine

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cpu_iteration.json"
WARMUP, MEASURED, ROUNDS = 4, 10, 3
TOKENS = 1024
SETTINGS = {
    "fp32": ["--precision-recipe", "bf16"],
    "nvfp4": ["--precision-recipe", "nvfp4"],
    "nvfp4, every block": ["--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none"],
    "nvfp4, reference engine": [
        "--precision-recipe",
        "nvfp4",
        "--quantization-engine",
        "reference",
    ],
}


def iteration_seconds(setting: list[str], data: list[str]) -> list[float]:
    """Measure the seconds of each iteration of one run."""
    with tempfile.TemporaryDirectory() as save:
        command = [
            sys.executable,
            str(ROOT / "pretrain_gpt.py"),
            f"@{ROOT / 'examples' / 'gpt-7m-cpu.args'}",
            *("--train-iters", str(WARMUP + MEASURED), "--lr-decay-iters", "1000"),
            *("--log-interval", "1", "--eval-iters", "1", "--save", save),
            *data,
            *setting,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(save) / "metrics.jsonl").read_text().splitlines()
    entries = {entry["iteration"]: entry for entry in map(json.loads, lines) if "lm_loss" in entry}
    return [
        TOKENS / entry["tokens_per_second"]
        for iteration, entry in entries.items()
        if iteration > WARMUP
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--tokenizer-model", required=True)
    args = parser.parse_args()
    data = ["--data-path", args.data_path, "--tokenizer-model", args.tokenizer_model]
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, setting in SETTINGS.items():
            times[name] += iteration_seconds(setting, data)
    fp32 = statistics.median(times["fp32"])
    rows = {
        name: {
            "median_s": round(statistics.median(seconds), 4),
            "quartiles_s": [round(q, 4) for q in statistics.quantiles(seconds, n=4)],
            "iterations": len(seconds),
            "over_fp32": round(statistics.median(seconds) / fp32, 3),
        }
        for name, seconds in times.items()
    }
    RESULT.parent.mkdir(exist_ok=True)
    measured_on = machine(threads=torch.get_num_threads(), megatron_core=version("megatron-core"))
    RESULT.write_text(json.dumps({"machine": measured_on, "settings": rows}, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name:26} {row['median_s'] * 1e3:7.0f} ms  {row['over_fp32']:.2f} x FP32")


if __name__ == "__main__":
    main()
