"""The page on planning: tables that are calculated, and plans compared with published figures."""

import re
from pathlib import Path

import planning as planning_page
import pytest

DOCS = Path(__file__).parents[2] / "docs"
PLANS, COMPARISONS = ((DOCS / page).read_text() for page in ("planning.md", "research/plans.md"))


def test_plans_beside_published_figures_are_today_s():
    assert planning_page.published() in COMPARISONS


def test_plans_are_near_published_figures():
    for row in planning_page.published().splitlines()[2:]:
        speed, planned = (cell.strip() for cell in row.split("|")[3:5])
        rate = float(re.match(r"[\d,]+", planned)[0].replace(",", ""))
        assert rate == pytest.approx(float(speed.replace(",", "")), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("preset", planning_page.CLUSTERS)
def test_calculated_tables_are_today_s(preset):
    assert planning_page.calculated(preset) in PLANS


@pytest.mark.parametrize("steps", [planning_page.short_steps, planning_page.long_steps])
def test_plans_of_measured_steps_are_today_s(steps):
    assert steps(planning_page.RESULTS) in COMPARISONS


def test_measured_tables_of_other_versions_stay(tmp_path):
    assert planning_page.body(tmp_path) is None
