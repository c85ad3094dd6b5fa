"""examples/launch/torchrun.sh: the same command again goes on where it was stopped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import ROOT, arguments_for, steps
from waiting import STOPPED, loaded, said, trained, until

PROCESSES = torch.cuda.device_count() or os.cpu_count()


@pytest.fixture
def start(corpus, launch):
    """Starts the tiny model; ``folder`` with the suffix .log is what it prints."""

    def run(folder: Path) -> subprocess.Popen:
        batch = f"--micro-batch-size 1 --global-batch-size {PROCESSES} --train-iters 100"
        script = [str(ROOT / "examples/launch/torchrun.sh"), str(folder), "pretrain_gpt.py"]
        training = arguments_for(corpus, (*batch.split(), "--save-interval", 50))
        command = [*script, *training]
        return launch(command, folder.with_suffix(".log"), PYTHON=sys.executable)

    return run


@pytest.mark.slow
@pytest.mark.skipif(PROCESSES > 8, reason=f"{PROCESSES} processes of the tiny model")
def test_stopped_it_goes_on(start, tmp_path):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    log = stopped.with_suffix(".log")
    run = start(stopped)
    until(lambda: trained(log, 3), log)
    run.terminate()
    run.wait(timeout=60)
    assert STOPPED in said(log)
    for folder in (stopped, whole):
        assert start(folder).wait(timeout=180) == 0, said(log)[-3000:]
    assert loaded(log, stopped)
    assert steps(stopped) == steps(whole) and len(steps(whole)) == 100
