"""Megatron-LM's ``tools/preprocess_data.py`` by ``lowbit-preprocess``, with its file names.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --workers 8 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/ --append-eod

writes ``corpus_text_document.bin`` and ``.idx``.
"""

from megatron_lowbit.command_line import CommandParser
from megatron_lowbit.data.preprocess import main as preprocess
from megatron_lowbit.errors import exit_on_user_error


def main() -> None:
    """Write a dataset of each key of the records."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--input", required=True, help="JSON records, an object per line")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="their text"
    )
    parser.add_argument("--output-prefix", required=True, help="PREFIX of PREFIX_KEY_document")
    parser.add_argument(
        "--tokenizer-type", choices=["HuggingFaceTokenizer"], default="HuggingFaceTokenizer",
        help="the only type of lowbit-preprocess",
    )  # fmt: skip
    parser.add_argument("--tokenizer-model", required=True, help="folder with tokenizer.json")
    parser.add_argument("--append-eod", action="store_true", help="end documents with a token")
    parser.add_argument("--workers", type=int, required=True, help="processes that tokenize")
    args = parser.parse_args()
    for key in args.json_keys:
        preprocess([
            "--input", args.input, "--json-keys", key, "--tokenizer-model", args.tokenizer_model,
            "--output-prefix", f"{args.output_prefix}_{key}_document",
            "--append-eod" if args.append_eod else "--no-append-eod",
            "--workers", str(args.workers),
        ])  # fmt: skip


if __name__ == "__main__":
    exit_on_user_error(main)
