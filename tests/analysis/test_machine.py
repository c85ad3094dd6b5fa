"""Description of the machine that measured figures belong to."""

import subprocess
from pathlib import Path

import pytest

from megatron_lowbit.analysis.machine import machine

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_a_checkout_names_its_commit():
    log = subprocess.run(["git", "log", "-1", "--format=%H"], cwd=ROOT, capture_output=True)
    assert machine()["commit"] == log.stdout.decode().strip() != ""


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine()["commit"] == ""
