"""Contents of a checkpoint: its tensors, their pieces and files, its model and its recipe.

    python tools/inspect_checkpoint.py RUN [--json]

RUN is a --save directory (its newest checkpoint), one iteration of it, or Hugging Face's folder.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_lowbit.command_line import CommandParser
from megatron_lowbit.conversion.inspect import inspect, report
from megatron_lowbit.errors import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the command line names."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("source", type=Path, metavar="RUN", help="see above")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args(argv)
    found = inspect(args.source)
    print(json.dumps(found) if args.json else "\n".join(report(found)))


if __name__ == "__main__":
    exit_on_user_error(main)
