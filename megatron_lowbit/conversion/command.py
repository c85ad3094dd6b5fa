"""Convert checkpoints of Hugging Face to Megatron-LM and back, and to llama.cpp.

    lowbit-convert to-megatron FOLDER OUTPUT
    lowbit-convert to-hugging-face CHECKPOINTS OUTPUT
    lowbit-convert to-gguf FOLDER FILE

To continue training: lowbit-pretrain @OUTPUT/model.args --load OUTPUT --finetune
--tokenizer-type HuggingFaceTokenizer --tokenizer-model OUTPUT/hugging_face ...
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lowbit.command_line import add_command, command_parser
from megatron_lowbit.conversion import DTYPES, LAYOUTS, SHARD_BYTES, TOKENS
from megatron_lowbit.errors import require, say

if TYPE_CHECKING:
    from megatron_lowbit.conversion.quantized import QuantizedAs


def main(argv: Sequence[str] | None = None) -> int:
    """Convert what the command line names; return 1 if ``--verify`` finds another model."""
    args = _parser().parse_args(argv)
    # After the help, which needs no torch.
    from megatron_lowbit.conversion import next_steps

    if args.command == "to-gguf":
        from megatron_lowbit.conversion.gguf_file import to_gguf

        summary = to_gguf(args.source, args.output, args.force)
        say(*next_steps.after_to_gguf(args.output, summary))
        return 0
    require(args.shard_bytes > 0, f"--shard-bytes {args.shard_bytes}: must be positive")
    require(args.verify or not args.verify_tokens, "--verify-tokens needs --verify")
    args.verify_tokens = args.verify_tokens or TOKENS
    from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
    from megatron_lowbit.conversion.quantized import QuantizedAs
    from megatron_lowbit.data.tokenizer import ids_beyond_model

    quantized = None
    if args.quantized:
        quantized = QuantizedAs(args.quantized, args.recipe, args.recipe_set, args.calibrate)
    named = args.recipe or args.recipe_set or args.calibrate
    message = "--recipe, --recipe-set and --calibrate go with --quantized"
    require(bool(quantized or not named), message)
    is_export = args.command == "to-hugging-face"
    if is_export and (warning := next_steps.missing_packages(args.quantized)):
        require(not args.verify, f"--verify: {warning}")
        say(warning, file=sys.stderr)
    if args.verify:
        # It needs megatron-core's models, which take seconds to import.
        from megatron_lowbit.conversion.verify import check_needs

        check_needs(args.source, args.command, args.verify_tokens, args.vocab_size)
    if is_export:
        converted = to_hugging_face(
            args.source, args.output, args.dtype, args.carry, args.shard_bytes, args.force,
            quantized, args.vocab_size,
        )  # fmt: skip
        folder, checkpoint = args.output, args.source
        lines = next_steps.after_to_hugging_face(args.output, converted, args.quantized)
    else:
        converted = to_megatron(args.source, args.output, args.force, args.shard_bytes)
        folder, checkpoint = args.source, args.output
        lines = next_steps.after_to_megatron(args.output, converted)
    lines[:0] = filter(None, [ids_beyond_model(folder)])
    wrong = _verify(args, folder, checkpoint, quantized, converted.name) if args.verify else None
    say(*lines)
    if wrong:
        say(f"error: --verify: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


def _verify(
    args: argparse.Namespace,
    folder: Path,
    checkpoint: Path,
    quantized: "QuantizedAs | None",
    family: str,
) -> str | None:
    """Compare both sides of a conversion; return what differs, None if nothing does."""
    from transformers.utils import logging

    from megatron_lowbit.conversion import next_steps, verify

    logging.set_verbosity_error()  # what it reports is compared here
    difference, largest = verify.verify(folder, checkpoint, args.verify_tokens, quantized)
    say(f"logits differ by {difference:.3g} at most; the largest is {largest:.3g}")
    limit = largest * (verify.ROUNDED_LIMIT if args.dtype else verify.LIMIT)
    if not difference <= limit:
        return f"the limit for logits is {limit:.3g}"
    if args.command == "to-megatron":
        return None
    result = next_steps.outcome(folder, family, args.quantized).result
    if result not in (next_steps.LOADS, next_steps.NOT_TRIED):
        say("weights are compared as lowbit-convert to-megatron reads them")
        return None
    name = verify.wrong_weight(folder, next_steps.READERS[args.quantized].dtype)
    if name is None:
        say("weights in transformers equal the files")
        return None
    return f"transformers does not load the weights of {folder}: {name}"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    there = add_command(commands, "to-megatron", "convert from Hugging Face to Megatron-LM")
    back = add_command(commands, "to-hugging-face", "convert from Megatron-LM to Hugging Face")
    gguf = add_command(commands, "to-gguf", "convert from Hugging Face to llama.cpp")
    for command, output in ((there, "folder"), (back, "folder"), (gguf, "file")):
        command.add_argument("source", type=Path, metavar="SOURCE", help="folder to convert")
        command.add_argument("output", type=Path, metavar="OUTPUT", help=f"a new {output}")
        command.add_argument("--force", action="store_true", help="replace OUTPUT")
    for command in (there, back):
        command.add_argument(
            "--shard-bytes", type=int, default=SHARD_BYTES, help="largest size of a file, in bytes"
        )
        command.add_argument(
            "--verify",
            action="store_true",
            help="compare, on a CPU, logits and the weights that transformers loads",
        )
        command.add_argument(
            "--verify-tokens", type=int, nargs="+", metavar="ID",
            help="token ids for --verify (default: 1 to 8)",
        )  # fmt: skip
    there.set_defaults(
        dtype=None, quantized=None, recipe=[], recipe_set=[], vocab_size=None, calibrate=None
    )
    back.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)")
    back.add_argument(
        "--carry", type=Path, metavar="FOLDER", help="folder with tokenizer and config.json"
    )
    back.add_argument(
        "--vocab-size", type=int, metavar="N",
        help="rows of the vocabulary to keep (default: --vocab-size of training, otherwise all)",
    )  # fmt: skip
    back.add_argument(
        "--quantized",
        choices=LAYOUTS,
        help="store weights as training quantizes them, in this layout",
    )
    back.add_argument(
        "--recipe", nargs="+", default=[], metavar="NAME_OR_FILE",
        help="recipe for --quantized (default: training's); the first of two is for fprop",
    )  # fmt: skip
    back.add_argument(
        "--recipe-set", metavar="FIELD=VALUE", action="append", default=[],
        help="change a field of that recipe, as in training (repeatable)",
    )  # fmt: skip
    back.add_argument(
        "--calibrate", type=Path, metavar="TEXT",
        help="compute the tensor scales of inputs by a forward pass over this file or folder",
    )  # fmt: skip
    return parser
