"""Pages without a test file of their own are what their generators write from the kept results."""

import json
import shutil

import evidence
import leaderboard
import parallelism
import results
from render import RESULTS, ROOT

from megatron_lowbit.study.definition import read_study


def test_parity(tmp_path):
    page = ROOT / "docs" / "distributed.md"
    copy = tmp_path / page.name
    shutil.copy(page, copy)
    parallelism.main(["--document", str(copy)])
    assert copy.read_text() == page.read_text()


def test_the_leaderboard():
    runs = json.loads(leaderboard.KEPT.read_text())
    assert (
        leaderboard.page(runs, leaderboard.SPEEDS, leaderboard.drawn(runs))
        == leaderboard.PAGE.read_text()
    )


def test_results_and_the_readme(tmp_path):
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for file in [*RESULTS.glob("flagship*.json"), *RESULTS.glob("gpu-time*.json"),
                 *(RESULTS / name for name in ("leaderboard.json", "peak_memory-h200.json")),
                 ROOT / "README.md"]:  # fmt: skip
        shutil.copy(file, tmp_path)
    results.main(["--results", str(tmp_path), "--root", str(tmp_path)])
    for page in ("README.md", "docs/results.md"):
        assert (tmp_path / page).read_text() == (ROOT / page).read_text()


def test_tables_of_studies():
    studies = {file.stem: read_study(file) for file in evidence.STUDIES.glob("*.yaml")}
    text, found = evidence.PAGE.read_text(), evidence.contenders_by_section(studies)
    for name, contenders in found.items():
        assert evidence.text_of(name, contenders) in text
