"""benchmarks/plan_check.py by its parts: what it reads, when it starts what; and its page."""

import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTPUT = """ [10:00] iteration 1/ 3 | elapsed time per iteration (ms): 1500.5 | lm loss: 5.0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 9.00 | max allocated: 512.00 | reserved: 9.0
[Rank 1] (after 1 iterations) memory (MB) | allocated: 9.00 | max allocated: 1024.00 | reserved: 9.0
 [10:01] iteration 2/ 3 | elapsed time per iteration (ms): 100.0 | lm loss: 4.0 |
[Rank 1] (after 2 iterations) memory (MB) | allocated: 9.00 | max allocated: 2816.00 | reserved: 9.0
[Rank 0] (after 2 iterations) memory (MB) | allocated: 9.00 | max allocated: 1536.00 | reserved: 9.0
 [10:01] iteration 3/ 3 | elapsed time per iteration (ms): 101.0 | lm loss: 3.0 |
"""


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    import plan_check

    return plan_check


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    import planning

    return planning


def test_times_and_memory_of_all_ranks_are_read_from_the_output(check):
    assert check.read_output(OUTPUT) == ([1500.5, 100.0, 101.0], [1.5, 2.75])


def test_cases_fit_an_80_gb_gpu_and_use_what_their_names_say(check, page):
    found = check.cases(tiny=False)
    assert len(found) == len({tuple(case.name) for case in found}) == 22
    for case in found:
        planned = page.planned(case.arguments, case.gpus, 4096, "h200", "torch")
        assert planned.gpus == case.gpus and planned.most_memory < 60 * 2**30
        layout = planned.layout
        kind, count = (case.layout[:2], int(case.layout[2:])) if case.gpus > 1 else ("TP", 1)
        assert {"TP": layout.tensor, "PP": layout.pipeline, "DP": layout.data}[kind] == count


def test_no_case_runs_on_a_device_that_another_has(check, monkeypatch):
    taken, at_once = [], []

    def start(case, devices, more):
        assert len(devices) == case.gpus and not set(devices) & set(taken)
        taken.extend(devices)
        at_once.append(len(taken))
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.1)"])
        folder = tempfile.TemporaryDirectory()
        return check.Started(case, list(devices), process, time.monotonic(), folder, None)

    def result(started):
        for device in started.devices:
            taken.remove(device)
        return {"name": started.case.name}

    monkeypatch.setattr(check, "start", start)
    monkeypatch.setattr(check, "result", result)
    todo = [case for case in check.cases(tiny=True) if case.recipe == "bf16"]
    rows = list(check.run(todo, ["0", "1"], [], seconds=100))
    # All but those of four GPUs, and two at a time.
    wanted = sorted(case.name for case in todo if case.gpus <= 2)
    assert sorted(row["name"] for row in rows) == wanted and max(at_once) == 2


def test_the_page_is_renewed_between_its_markers_alone(check, page, monkeypatch, tmp_path):
    monkeypatch.setattr(page, "CLUSTERS", {})
    for name in ("published", "short_steps", "long_steps"):
        monkeypatch.setattr(page, name, lambda *_: "")
    begin, end = "<!-- measured: by hand -->", "<!-- /measured -->"
    document = tmp_path / "page.md"
    names = ("published", "short-steps", "long-steps")
    others = "".join(f"<!-- {name}: x -->\n<!-- /{name} -->\n" for name in names)
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n{others}")
    case = check.cases(tiny=False)[0]
    row = {
        "model": case.model, "recipe": case.recipe, "layout": case.layout, "gpus": 1,
        "arguments": case.arguments, "vocabulary": 4096, "memory_gib": [50.0],
        "tokens_per_s": 10000.0,
    }  # fmt: skip
    failed = {"model": "M", "recipe": "R", "layout": "L", "failed": "out of memory"}
    machine = {"gpu": "NVIDIA H200", "torch": "2", "date": "today", "commit": "abc"}
    machine["megatron_core"] = version("megatron-core")
    data = {"machine": machine, "gpus": 1, "rows": [row, failed]}
    old = data | {"machine": machine | {"gpu": "an old GPU", "megatron_core": "0.16.1"}}
    (tmp_path / "plan_check-old.json").write_text(json.dumps(old))
    (tmp_path / "plan_check-x.json").write_text(json.dumps(data))
    page.write_page(document, tmp_path)
    text = document.read_text()
    assert text.startswith("before\n") and "\nafter\n" in text and "old" not in text
    assert "an old GPU" not in text
    # A step is four sequences of 4096 tokens.
    assert "| 50.00 |" in text and "| 1638.4 |" in text and "- M, R, L: out of memory" in text


def test_long_steps_stand_beside_their_plans(check, page, tmp_path):
    """Models with cases in graphs count with those alone, and without their memory."""
    case = {"tokens_per_s": 16384, "peak_gib": 100.0, "precision": "fp8-tile"}
    rows = [
        {**case, "model": "llama-8b-32", "graphs": False},
        {**case, "model": "llama-8b-20", "graphs": True},
        {**case, "model": "llama-8b-20", "graphs": False},
        {**case, "model": "llama-8b-20", "graphs": True, "precision": "nvfp4", "error": "memory"},
    ]
    data = {"machine": {"gpu": "NVIDIA H200"}, "models": {}, "peak_tflops": 989, "rows": rows}
    (tmp_path / "flagship-h200.json").write_text(json.dumps(data))
    shown = page.long_steps(tmp_path).splitlines()[2:]
    graphs, whole = (dict(enumerate(line.strip("| ").split(" | "))) for line in shown)
    assert graphs[1] == "llama-8b-20 graphs fp8-tile" and whole[1] == "llama-8b-32 fp8-tile"
    assert graphs[3] == whole[3] == "1000.0" and len(graphs) < len(whole) == 8
    assert whole[6] == "100.00" and float(whole[7].rstrip("%")) == pytest.approx(10.7, abs=0.1)
