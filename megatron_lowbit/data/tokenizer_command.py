"""Train a byte-level BPE tokenizer that Hugging Face's AutoTokenizer and Megatron can load.

Example: lowbit-tokenizer --input corpus/ --pattern '*.txt' --vocab-size 32000 --output tokenizer/
"""

import argparse
from pathlib import Path

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.data.corpus import (
    add_corpus_arguments,
    collect_files,
    read_documents,
    report_skipped,
)
from megatron_lowbit.data.tokenizer import train_tokenizer
from megatron_lowbit.folders import check_file, check_folder, writing


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line and run it."""
    parser = command_parser(description=__doc__)
    add_corpus_arguments(parser)
    parser.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="number of tokens, the 256 bytes and the special token included",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for tokenizer.json and tokenizer_config.json",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train on what the command line names."""
    args = parse_arguments(argv)
    check_folder("--output", args.output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        check_file("--output", args.output / name)
    files = collect_files(args.input, args.pattern, args.exclude)
    skipped: list[Path] = []
    documents = read_documents(
        files, args.json_keys, required=[Path(p) for p in args.input], skipped=skipped
    )
    texts = (text for document in documents for text in document.texts)
    with writing("--output", args.output):
        size = train_tokenizer(texts, args.vocab_size, args.output)
    print(f"{args.output}: {size:,} tokens from {len(files) - len(skipped):,} files")
    if size < args.vocab_size:
        print(f"the input has too few different pairs for --vocab-size {args.vocab_size:,}")
    report_skipped(skipped)
