"""Rank of a torchrun job that makes several runs one after another: ``rank_of_runs.py JOB``.

A process for each run would spend most of its time importing torch. Megatron-LM's checkpoint
writers start processes that import this file, which therefore imports nothing else.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from tiny_run import make_runs

    make_runs(Path(sys.argv[1]))
