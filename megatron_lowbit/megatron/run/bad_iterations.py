"""Restart from the last checkpoint after a loss or gradient that is not finite, without its data.

Megatron-LM ends such a run with an error. ``--skip-bad-iterations`` records the iteration in
SAVE/bad_iterations.json before a restart. A run of one process restarts itself; others need their
launcher (``torchrun --max-restarts``, a requeued job). The restarted run skips the recorded
iterations by Megatron-LM's ``--iterations-to-skip``.
"""

import json
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lowbit.arguments import compatibility
from megatron_lowbit.arguments.rows import refuse
from megatron_lowbit.errors import TrainingError, UserError, say
from megatron_lowbit.folders import replace_text
from megatron_lowbit.json_files import parse_json

NOTES = "bad_iterations.json"


@contextmanager
def skip_bad_iterations(args: Namespace) -> Iterator[None]:
    """Skip the iterations that this run has recorded before; record one that fails now.

    Raises UserError for arguments that allow no restart from a checkpoint, and TrainingError where
    more iterations failed than the argument allows, or one failed and the launcher has to restart
    the run.
    """
    if args.skip_bad_iterations is None:
        yield
        return
    refuse(compatibility.bad_iterations(args))
    notes = Path(args.save) / NOTES
    bad = read_notes(notes)
    args.iterations_to_skip = sorted({*args.iterations_to_skip, *bad})
    if bad and args.rank == 0:
        say(f"{notes}: skipping iterations {', '.join(map(str, bad))}")
    try:
        yield
    except RuntimeError as error:
        if "Unexpected result" not in str(error):  # Megatron-LM's message with reruns disabled
            raise
        failed = args.curr_iteration + 1
        trouble = f"iteration {failed}: loss or gradients are not finite"
        if len(bad) >= args.skip_bad_iterations:
            raise TrainingError(
                f"{trouble}, after {len(bad)} skipped iterations (--skip-bad-iterations)"
            ) from error
        # Several ranks may record it.
        replace_text(notes, json.dumps([*bad, failed]) + "\n", tag=f".{args.rank}")
        if args.world_size > 1:
            raise TrainingError(f"{trouble}: recorded; a restarted run skips it") from error
        say(f"{trouble}: restarting from the last checkpoint without its data")
        # Worker processes for checkpoints and data would outlive exec and keep the output open.
        for process in multiprocessing.active_children():
            process.terminate()
            process.join()
        os.execv(sys.executable, sys.orig_argv)


def read_notes(path: Path) -> list[int]:
    """Return the recorded iterations, counted from 1; an empty list without a file."""
    if not path.is_file():
        return []
    try:
        bad = parse_json(path.read_bytes(), str(path))
    except UserError:
        bad = None
    if not (isinstance(bad, list) and all(type(number) is int and number > 0 for number in bad)):
        raise UserError(f"{path}: not a JSON list of iterations; correct or delete it")
    return bad
