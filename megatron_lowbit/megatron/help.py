"""Rendered help of the pretraining commands, kept in the user's cache.

Megatron-LM's 800 arguments are known only once torch and megatron are imported, which takes
seconds. So the text is rendered once for each version; afterwards
:func:`megatron_lowbit.command_line.print_cached_help` prints it before any such import.
"""

import argparse
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatron_lowbit.command_line import HELP_PROGRAM, help_cache, print_help


def show_help(command: str, parser: argparse.ArgumentParser) -> NoReturn:
    """Render a command's help, store it in the user's cache, print it and exit."""
    parser.prog = HELP_PROGRAM
    text = parser.format_help()
    # Without a place to store it, the help is only slower. RuntimeError: there is no home folder.
    with suppress(OSError, RuntimeError):
        _write_atomically(help_cache(command), text)
    print_help(text)


def _write_atomically(path: Path, text: str) -> None:
    """Write a file by renaming a complete one, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
