"""Arguments that read checkpoints while the command line is parsed, and what they take over.

With ``--use-checkpoint-args``, Megatron-LM reads a checkpoint's arguments while it parses its own,
prints them, and imports the module that the checkpoint's ``--spec`` names.
"""

import argparse
import os
import reprlib
from argparse import Namespace
from collections.abc import Mapping
from functools import cache, wraps
from pathlib import Path
from textwrap import shorten
from typing import Any

from megatron_lowbit.arguments.values import range_of
from megatron_lowbit.errors import UserError, printable, require
from megatron_lowbit.storage import files
from megatron_lowbit.storage.pickles import COMMON, read_objects, restrict_torch
from megatron_lowbit.storage.selection import selected

_READ = (COMMON, "args", "iteration", "checkpoint_version")
"""Keys of the objects that Megatron-LM reads for the arguments."""


@cache
def guard_checkpoint_arguments() -> None:
    """Check the arguments that this process takes from checkpoints while it parses.

    Readers of sharded checkpoints run no code from now on, and what Megatron-LM prints of a
    checkpoint is escaped.
    """
    from megatron.training import checkpointing

    restrict_torch()
    upstream, show = checkpointing.load_args_from_checkpoint, checkpointing.print_rank_0

    @wraps(upstream)
    def load(args: Namespace, load_arg: str = "load", **context: Any) -> Any:
        directory = getattr(args, load_arg)
        checkpoint = selected(args, directory and Path(directory))
        if checkpoint is None:
            return upstream(args, load_arg, **context)
        _verify_arguments(checkpoint.path)
        before = dict(vars(args))
        try:
            loaded = upstream(args, load_arg, **context)
        except (Exception, SystemExit) as error:
            why = shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...")
            raise UserError(f"{checkpoint.path}: its arguments cannot be read: {why}") from error
        known = vars(args).keys() & before.keys()
        taken = {name: value for name in known if (value := getattr(args, name)) != before[name]}
        _check_taken(taken, f"--use-checkpoint-args: {checkpoint.path}")
        return loaded

    checkpointing.load_args_from_checkpoint = load
    checkpointing.print_rank_0 = wraps(show)(
        lambda message, *rest, **settings: show(printable(str(message)), *rest, **settings)
    )


def check_loads(args: Namespace) -> None:
    """Raise UserError for checkpoints and data that would be read without a check."""
    require(
        args.non_persistent_ckpt_type != "local",
        "--non-persistent-ckpt-type local: nvidia-resiliency-ext unpickles its checkpoints "
        "without a check; give global",
    )
    require(
        not args.enable_msc,
        "--enable-msc: files in object storage would be read without a check; copy them to a "
        "folder, and omit it",
    )


def _verify_arguments(path: Path) -> None:
    """Raise UserError where a checkpoint's arguments are damaged or could run code.

    The first rank compares the lengths of all files, and the checksums of those that hold the
    arguments.
    """
    sources = {file for file, _, _ in read_objects(path, _READ)}
    if os.environ.get("RANK", "0") != "0":
        return
    recorded = files.recorded_files(path) or {}
    files.check_sizes(path, recorded, recorded)
    read = [name for name in recorded if not name.endswith(".distcp") or path / name in sources]
    files.check_files(path, recorded, read)


def _check_taken(taken: Mapping[str, Any], source: str) -> None:
    """Raise UserError for an argument of a checkpoint that no command line could have.

    That is a value outside its argument's range, or the name of a module to import. ``taken`` are
    the values that differ from the command line's; ``source`` is the checkpoint, for errors.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = {action.dest: action for action in parser._actions}
    for name, value in taken.items():
        text = f"{source}: {name} {reprlib.repr(value)}"
        require(
            name != "spec",
            f"{text}: names Python code to import; give the same --spec if you trust that code",
        )
        action = actions.get(name)
        if action is None or not action.option_strings:
            good = isinstance(value, bool | int | float)
        elif action.type in (int, float):
            low, high, _ = range_of(action)
            good = type(value) in (int, float) and low <= value <= high
        elif action.nargs == 0:
            good = isinstance(value, bool)
        elif action.choices is not None:
            good = value in list(action.choices)
        elif isinstance(value, list):
            good = all(isinstance(entry, int) for entry in value)
        else:
            good = isinstance(value, int) or (isinstance(value, str) and value.isprintable())
        require(good, f"{text}: no value of this argument")
