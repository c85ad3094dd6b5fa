"""benchmarks/plan_check.py by its parts: what it reads, when it starts what; and its page."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOG = """2026-11-22 10:00:00,000 INFO parameters on rank 0: 1,000
2026-11-22 10:00:01,000 INFO iteration 1/3 | loss 5.0000 | 100 tokens/s | 0.5 TFLOP/s | 1.25 GiB
2026-11-22 10:00:02,000 INFO iteration 2/3 | loss 4.0000 | 12,345 tokens/s | 1 TFLOP/s | 1.50 GiB
2026-11-22 10:00:03,000 INFO iteration 3/3 | loss 3.0000 | 12,346 tokens/s | 1 TFLOP/s | 1.50 GiB
"""


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    import plan_check

    return plan_check


@pytest.fixture
def page(check):
    import planning_page

    return planning_page


def test_speeds_and_memory_of_all_ranks_are_read_from_their_logs(check):
    other = LOG.replace("1.50 GiB", "2.75 GiB")
    assert check.read_logs([LOG, other]) == ([100.0, 12345.0, 12346.0], [1.5, 2.75])


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
    begin, end = f"<!-- measured: {page.MADE} -->", "<!-- /measured -->"
    document = tmp_path / "page.md"
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    case = check.cases(tiny=False)[0]
    row = {
        "model": case.model, "recipe": case.recipe, "layout": case.layout, "gpus": 1,
        "arguments": case.arguments, "vocabulary": 4096, "memory_gib": [50.0],
        "tokens_per_s": 10000.0,
    }  # fmt: skip
    failed = {"model": "M", "recipe": "R", "layout": "L", "failed": "out of memory"}
    machine = {"gpu": "NVIDIA H200", "torch": "2", "date": "today", "commit": "abc"}
    data = {"machine": machine, "gpus": 1, "rows": [row, failed]}
    (tmp_path / "plan_check-x.json").write_text(json.dumps(data))
    page.write_page(document, tmp_path)
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    # A step is four sequences of 4096 tokens.
    assert "| 50.00 |" in text and "| 1638.4 |" in text and "- M, R, L: out of memory" in text
