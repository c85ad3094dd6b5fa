"""Go back to the last checkpoint after a loss or gradient that is not finite, and skip its data.

Megatron-LM ends the run with an error then. With ``--skip-bad-iterations`` the iteration is noted
in SAVE/bad_iterations.json and the run is started again: by itself where it is one process, else by
its launcher (``torchrun --max-restarts``, a requeued job). Megatron-LM's ``--iterations-to-skip``
then leaves the iteration out.
"""

import json
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lowbit.errors import TrainingError, UserError, require
from megatron_lowbit.json_files import parse_json

NOTES = "bad_iterations.json"

# How Megatron-LM's error says what it saw in disabled rerun mode.
_NOT_FINITE = "Unexpected result"


def check_arguments(args: Namespace) -> None:
    """Raise UserError unless the arguments let a run go back."""
    option = f"--skip-bad-iterations {args.skip_bad_iterations}"
    require(args.skip_bad_iterations > 0, f"{option}: must be positive")
    require(
        args.save is not None and args.save == args.load,
        f"{option} needs --save and --load, of the same folder",
    )
    require(args.check_for_nan_in_loss_and_grad, f"{option} needs loss and gradients checked")
    require(
        args.rerun_mode == "disabled",
        f"{option} needs --rerun-mode disabled: Megatron-LM's reruns would look for the same error",
    )


@contextmanager
def bad_iterations_skipped(args: Namespace) -> Iterator[None]:
    """Skip the iterations that earlier starts of this run have noted; note one that fails now.

    Raises TrainingError after as many as the argument allows, and, where a launcher is to start the
    run again, for each.
    """
    if args.skip_bad_iterations is None:
        yield
        return
    check_arguments(args)
    notes = Path(args.save) / NOTES
    bad = read_notes(notes)
    args.iterations_to_skip = sorted({*args.iterations_to_skip, *bad})
    if bad and args.rank == 0:
        print(f"{notes}: skipping iterations {', '.join(map(str, bad))}", flush=True)
    try:
        yield
    except RuntimeError as error:
        if _NOT_FINITE not in str(error):
            raise
        failed = args.curr_iteration + 1
        trouble = f"iteration {failed}: loss or gradients are not finite"
        if len(bad) >= args.skip_bad_iterations:
            raise TrainingError(
                f"{trouble}, after {len(bad)} skipped iterations (--skip-bad-iterations)"
            ) from error
        _write_notes(notes, [*bad, failed])
        if args.world_size > 1:
            raise TrainingError(f"{trouble}: noted; started again, the run skips it") from error
        print(f"{trouble}: back to the last checkpoint, without its data", flush=True)
        sys.stdout.flush()
        # Workers of checkpoints and data would outlive the program, and keep its output open.
        for process in multiprocessing.active_children():
            process.terminate()
            process.join()
        os.execv(sys.executable, sys.orig_argv)


def read_notes(path: Path) -> list[int]:
    """Return the noted iterations, counted from 1; none where there is no file."""
    if not path.is_file():
        return []
    try:
        bad = parse_json(path.read_bytes(), str(path))
    except UserError:
        bad = None
    if not (isinstance(bad, list) and all(type(number) is int and number > 0 for number in bad)):
        raise UserError(f"{path}: not a JSON list of iterations; correct or delete it")
    return bad


def _write_notes(path: Path, bad: list[int]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(bad) + "\n")
    os.replace(temporary, path)
