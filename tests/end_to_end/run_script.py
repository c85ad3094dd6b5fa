"""Runs in a test's process: ``run_script.py ARGUMENTS...``, or ``run_script.py JOB RANK``.

A rank makes the runs of a JOB, a JSON file, one after another; runs of ``stored.json`` have BF16
weights, and record what they receive and keep. Megatron-LM's checkpoint writers start processes
that import this file, which therefore imports nothing else.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

if __name__ == "__main__":
    from tiny_run import make_runs, run_alone

    job = Path(sys.argv[1])
    if job.suffix == ".json":
        recorded = nullcontext()
        if job.name == "stored.json":
            from stored_weights_run import recorded_runs

            recorded = recorded_runs(job.parent)
        with recorded:
            make_runs(job)
    else:
        run_alone(sys.argv[1:])
