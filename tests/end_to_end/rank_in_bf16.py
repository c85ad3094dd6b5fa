"""Rank that makes runs as ``rank_of_runs.py`` does, with BF16 weights and a record of gathers.

``rank_in_bf16.py JOB RANK`` writes what each run of the job received and kept to NAME.RANK.json.
Megatron-LM's checkpoint writers start processes that import this file.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from stored_weights_run import recorded_runs
    from tiny_run import make_runs

    with recorded_runs(Path(sys.argv[1]).parent):
        make_runs(Path(sys.argv[1]))
