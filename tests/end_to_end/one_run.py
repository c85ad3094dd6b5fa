"""The pretraining script that suits its arguments, in a test's process.

Megatron-LM's checkpoint writers start processes that import this file, as ``rank_of_runs.py``.
"""

import sys

if __name__ == "__main__":
    from tiny_run import run_alone

    run_alone(sys.argv[1:])
