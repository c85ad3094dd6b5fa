"""The runner of cases, and figures of Megatron-LM's log."""

import json
import time
from types import SimpleNamespace

from benchmarks import stored_weights, training_steps
from benchmarks.training_steps import run_cases

MEMORY = """
[Rank 0] (after 1 iterations) memory (MB) | allocated: 9.00 | max allocated: 512.00 | reserved: 9.0
[Rank 1] (after 1 iterations) memory (MB) | allocated: 9.00 | max allocated: 1024.00 | reserved: 9.0
 [10:01] iteration 2/ 3 | elapsed time per iteration (ms): 100.0 | lm loss: 4.0 |
[Rank 1] (after 2 iterations) memory (MB) | allocated: 9.00 | max allocated: 2816.00 | reserved: 9.0
[Rank 0] (after 2 iterations) memory (MB) | allocated: 9.00 | max allocated: 1536.00 | reserved: 9.0
"""


def test_the_last_memory_of_each_rank():
    row = training_steps.figures_of(training_steps.read_log(MEMORY))
    assert row["memory_gib"] == [1.5, 2.75] and row["peak_gib"] == 2.75


def arguments(file, *words):
    parser = training_steps.cases_parser(None, seconds=100)
    return parser.parse_args(["--output", str(file), *words])


def test_no_case_runs_on_a_device_that_another_has(tmp_path):
    taken, at_once = set(), []

    def run(case, devices):
        own = set(devices.split(","))
        assert not own & taken
        taken.update(own)
        at_once.append(len(taken))
        time.sleep(0.02)
        taken.difference_update(own)
        return {"devices": devices}

    cases = {f"{gpus} {n}": SimpleNamespace(gpus=gpus) for n in range(4) for gpus in (1, 2)}
    rows = run_cases(cases, run, arguments(tmp_path / "a.json"), 2, ["0", "1"])
    assert sorted(row["case"] for row in rows) == sorted(cases)
    assert all(len(row["devices"]) == 2 * int(row["case"][0]) - 1 for row in rows)
    assert max(at_once) == 2


def test_names_parts_and_repetitions(tmp_path, capsys):
    """A whole name is not taken for a part of others; rows of each case are counted."""
    file = tmp_path / "a.json"
    cases, run = dict.fromkeys(("a b", "a b c", "d")), lambda *_: {"median_ms": 1.0}
    run_cases(cases, run, arguments(file, "--only", "a b", "--repeat", "2"), 1)
    assert [row["case"] for row in json.loads(file.read_text())["rows"]] == ["a b", "a b"]
    run_cases(cases, run, arguments(file, "--only", "a", "d", "--list"), 1)
    assert capsys.readouterr().out.splitlines()[-2:] == ["a b c", "d"]


def test_a_record_has_the_machine_and_the_command(tmp_path):
    run_cases({"a": None}, lambda *_: {}, arguments(tmp_path / "a.json"), 3, peak=1)
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["peak"] == 1 and record["machine"]["gpus"] == 3
    names = ("gpu", "driver", "torch", "triton", "transformer_engine", "cublaslt", "commit")
    assert record["machine"].keys() >= {*names, "command", "megatron_core"}


def test_figures_are_each_ranks_largest_and_the_slowest_ranks_median():
    step = dict.fromkeys(("reserved", "allocated_before", "allocated_by_layers", "received"), 1)
    ranks = [
        [step | {"allocated": size, "ms": ms} for size, ms in steps]
        for steps in ([(5, 10), (7, 20), (6, 30)], [(9, 15), (8, 18), (8, 20)])
    ]
    found = stored_weights.summary(ranks)
    assert found["allocated"] == [7, 9] and found["median_ms"] == 20
