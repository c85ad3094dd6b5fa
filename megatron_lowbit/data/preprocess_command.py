"""Tokenize text into a Megatron indexed dataset: PREFIX.bin, PREFIX.idx and PREFIX.json.

Each JSON record is a document: an object per line, or the entries of an array. Any other text file
is one document; the only file, or one of more than 256 KiB, is split after paragraphs into pieces
of at most 16,384 characters, so that --split can divide it for training and validation. Content
decides, not a file's name; it may be compressed with gzip, Zstandard, bzip2 or xz. With several
--json-keys each key becomes a dataset of its own, PREFIX_KEY.

Example: lowbit-preprocess --input corpus.jsonl --tokenizer-model tokenizer/ --output-prefix corpus
"""

import argparse

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.data.corpus import add_corpus_arguments, preprocess


def main(argv: list[str] | None = None) -> None:
    """Tokenize what the command line names."""
    parser = command_parser(description=__doc__)
    add_corpus_arguments(parser)
    parser.add_argument(
        "--tokenizer-model", required=True, metavar="DIR", help="folder with tokenizer.json"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX",
        help="path of the dataset without suffix, as --data-path takes it",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that tokenize"
    )
    parser.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=True,
        help="end each document with the end-of-document token (default: on)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    preprocess(
        args.input, args.tokenizer_model, args.output_prefix, json_keys=args.json_keys,
        pattern=args.pattern, exclude=args.exclude, workers=args.workers,
        append_eod=args.append_eod,
    )  # fmt: skip
