"""Rank that makes several runs one after another: ``rank_of_runs.py JOB RANK``.

Megatron-LM's checkpoint writers start processes that import this file, which therefore imports
nothing else.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from tiny_run import make_runs

    make_runs(Path(sys.argv[1]))
