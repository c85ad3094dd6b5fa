"""benchmarks/plan_check.py by its parts: what it reads, when it starts what; and its page."""

import json
from importlib.metadata import version
from pathlib import Path

import planning as page
import pytest

from benchmarks import plan_check as check

TENSORWISE = "Megatron-LM FP8 tensorwise"


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def test_cases_fit_an_80_gb_gpu_and_use_what_their_names_say():
    every_case = check.cases(tiny=False)
    assert len(every_case) == len({case.name for case in every_case}) == 22
    for case in every_case:
        planned = page.planned(case.arguments, case.gpus, 4096, "h200", "torch")
        assert planned.gpus == case.gpus and planned.most_memory < 60 * 2**30
        layout = planned.layout
        dimension, count = (case.layout[:2], int(case.layout[2:])) if case.gpus > 1 else ("TP", 1)
        assert {"TP": layout.tensor, "PP": layout.pipeline, "DP": layout.data}[dimension] == count


def test_cases_run_and_are_not_repeated(monkeypatch, tmp_path):
    """A case takes as many devices as its layout; what another machine's file holds is omitted."""
    held = check.cases(tiny=True)[0]
    other = {"machine": {"megatron_core": version("megatron-core")}, "rows": [held._asdict()]}
    (tmp_path / "plan_check-other.json").write_text(json.dumps(other))
    taken = {}

    def train(script, words, gpus, devices, patience):
        taken[len(taken)] = gpus, devices, script
        return {"error": "lost"} if len(taken) == 1 else {"median_ms": 100.0, "memory_gib": [1.0]}

    monkeypatch.setattr(check, "train", train)
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: False)
    file = tmp_path / "plan_check-here.json"
    check.main(["--output", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(taken) == sum(case.gpus <= 2 for case in check.cases(tiny=True)) - 1
    assert all(devices.count(",") == gpus - 1 for gpus, devices, _ in taken.values())
    assert {script for *_, script in taken.values()} == {"pretrain_gpt.py", "pretrain_hybrid.py"}
    assert [row["error"] for row in rows if "error" in row] == ["lost"]
    check.main(["--output", str(file)])
    again = json.loads(file.read_text())["rows"]
    assert len(taken) == len(rows) + 1 and not any("error" in row for row in again)


def test_the_page_is_renewed_only_between_its_markers(monkeypatch, tmp_path):
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
    failed = {"model": "M", "recipe": "R", "layout": "L", "error": "out of memory"}
    machine = {"gpu": "NVIDIA H200", "torch": "2", "date": "today", "commit": "abc"}
    machine["megatron_core"] = version("megatron-core")
    data = {"machine": machine, "gpus": 1, "rows": [row, failed]}
    old = data | {"machine": machine | {"gpu": "an old GPU", "megatron_core": "0.16.1"}}
    (tmp_path / "plan_check-old.json").write_text(json.dumps(old))
    (tmp_path / "plan_check-x.json").write_text(json.dumps(data))
    page.write_comparisons(document, tmp_path)
    text = document.read_text()
    assert text.startswith("before\n") and "\nafter\n" in text and "old" not in text
    assert "an old GPU" not in text
    # A step is four sequences of 4096 tokens.
    assert "| 50.00 |" in text and "| 1638.4 |" in text and "- M, R, L: out of memory" in text


def test_long_steps_stand_beside_their_plans(tmp_path):
    """Models with cases in graphs count with those alone, and without their memory.

    Megatron-LM's own FP8 does not count.
    """
    case = {"tokens_per_s": 16384, "peak_gib": 100.0, "precision": "fp8-tile"}
    rows = [
        {**case, "model": "llama-8b-32", "graphs": False},
        {**case, "model": "llama-8b-20", "graphs": True},
        {**case, "model": "llama-8b-20", "graphs": False},
        {**case, "model": "llama-8b-20", "graphs": True, "precision": "nvfp4", "error": "memory"},
        {**case, "model": "llama-8b-20", "graphs": True, "precision": TENSORWISE},
    ]
    data = {"machine": {"gpu": "NVIDIA H200"}, "models": {}, "peak_tflops": 989, "rows": rows}
    (tmp_path / "flagship-h200.json").write_text(json.dumps(data))
    shown = page.long_steps(tmp_path).splitlines()[2:]
    graphs, full = (dict(enumerate(line.strip("| ").split(" | "))) for line in shown)
    assert graphs[1] == "llama-8b-20 graphs fp8-tile" and full[1] == "llama-8b-32 fp8-tile"
    assert graphs[3] == full[3] == "1000.0" and len(graphs) < len(full) == 8
    assert full[6] == "100.00" and float(full[7].rstrip("%")) == pytest.approx(10.7, abs=0.1)
