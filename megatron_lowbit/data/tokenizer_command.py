"""Train a byte-level BPE tokenizer that Hugging Face's AutoTokenizer and Megatron can load.

Example: lowbit-tokenizer --input corpus/ --pattern '*.txt' --vocab-size 32000 --output tokenizer/
"""

from pathlib import Path

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.data.corpus import Corpus, add_corpus_arguments
from megatron_lowbit.data.tokenizer import check_output, train_tokenizer
from megatron_lowbit.errors import say
from megatron_lowbit.folders import check_file, check_folder, writing


def main(argv: list[str] | None = None) -> None:
    """Train on what the command line names."""
    parser = command_parser(description=__doc__)
    add_corpus_arguments(parser)
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N",
        help="number of tokens, the 256 bytes and the special token included",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR",
        help="folder for tokenizer.json and tokenizer_config.json",
    )  # fmt: skip
    args = parser.parse_args(argv)
    check_folder("--output", args.output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        check_file("--output", args.output / name)
    check_output(args.output)
    corpus = Corpus(args.input, args.json_keys, args.pattern, args.exclude)
    texts = (text for document in corpus.documents() for text in document.texts)
    with writing("--output", args.output):
        size = train_tokenizer(texts, args.vocab_size, args.output)
    count = len(corpus.files) - len(corpus.skipped)
    say(f"{args.output}: {size:,} tokens from {count:,} files")
    if size < args.vocab_size:
        say(f"the input has too few different pairs for --vocab-size {args.vocab_size:,}")
    corpus.report_skipped()
