"""Train a byte-level BPE tokenizer that Hugging Face's AutoTokenizer and Megatron-LM can load.

Example: lowbit-tokenizer --input corpus/ --pattern '*.txt' --vocab-size 32000 --output tokenizer/
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.data.corpus import Corpus, add_corpus_arguments
from megatron_lowbit.errors import UserError, as_user_error, require, say
from megatron_lowbit.folders import check_file, check_folder, replace_text, replacing, writing
from megatron_lowbit.json_files import Entries, read_object, read_small
from megatron_lowbit.storage.lock import FolderLock

END_OF_TEXT = "<|endoftext|>"
_MODEL_FILE, _CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_READ = re.compile(r"(?!.*\.index\.json).*\.(json|jinja|model|tiktoken|txt)")
"""Files of a tokenizer in a model's folder."""
_CONFIG = json.dumps({
    "tokenizer_class": "PreTrainedTokenizerFast",
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END_OF_TEXT),
    # Otherwise decoding drops spaces before punctuation.
    "clean_up_tokenization_spaces": False,
}, indent=2) + "\n"  # fmt: skip
TOKENIZER_TYPE = "HuggingFaceTokenizer"
_MOST_TOKENS = 1 << 22
"""Far more than published tokenizers have; tokenizers reserves memory for all, or aborts."""


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
    own = tokenizer_files(args.output)
    for file in own:
        check_file("--output", file)
    check_output(args.output)
    corpus = Corpus(args.input, args.json_keys, args.pattern, args.exclude, own)
    texts = (text for document in corpus.documents() for text in document.texts if text)
    first = next(texts, "")
    require(bool(first), f"--input {', '.join(args.input)}: holds no text")
    with writing("--output", args.output):
        size = train_tokenizer(chain([first], texts), args.vocab_size, args.output)
    count = len(corpus.files) - len(corpus.skipped)
    say(f"{args.output}: {size:,} tokens from {count:,} files")
    if size < args.vocab_size:
        say(f"the input has too few different pairs for --vocab-size {args.vocab_size:,}")
    corpus.report_skipped()


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder's tokenizer and of its configuration."""
    return [folder / _MODEL_FILE, folder / _CONFIG_FILE]


def files_read(tokenizer_model: str) -> list[Path]:
    """Return the local files that a tokenizer may be loaded from: the path, or those in a folder.

    There are none for a name on the Hugging Face Hub.
    """
    path = Path(tokenizer_model)
    if path.is_file():
        return [path]
    return [file for file in sorted(path.glob("*")) if _READ.fullmatch(file.name)]


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of a folder with tokenizer.json.

    Attributes:
        vocab_size: largest id + 1.
        eod: id that ends each document.
        sha256: digest of tokenizer.json.
        special_tokens: texts that ``tokenize`` reads as special tokens, by the ids of these.
    """

    vocab_size: int
    eod: int
    tokenize: Callable[[str], list[int]]
    detokenize: Callable[[list[int]], str]
    sha256: str
    special_tokens: Mapping[int, str]


def load_tokenizer(tokenizer_type: str, tokenizer_model: str | None) -> Tokenizer:
    """Load a tokenizer, which adds no special tokens to a text.

    ``tokenizer_type`` is Megatron-LM's name of the type; only HuggingFaceTokenizer is supported.
    ``tokenizer_model`` is the folder with tokenizer.json. Raises UserError where these, or the
    folder's files, do not fit.
    """
    is_known = tokenizer_type == TOKENIZER_TYPE
    require(is_known, f"--tokenizer-type {tokenizer_type}: choose {TOKENIZER_TYPE}")
    if tokenizer_model is None:
        raise UserError("--tokenizer-model: give the folder that holds tokenizer.json")
    folder = Path(tokenizer_model)
    path = folder / _MODEL_FILE
    require(
        path.is_file(), f"--tokenizer-model {folder}: there is no tokenizer.json in this folder"
    )
    model, content = _read(path)
    # A saved tokenizer may carry the truncation and padding of its last use.
    model.no_truncation()
    model.no_padding()
    eod_token = _eod_token(folder)
    eod = model.token_to_id(eod_token)
    if eod is None:
        raise UserError(
            f"{path}: the end-of-document token {eod_token!r} is not in the vocabulary; "
            f"name one that is as eos_token in {folder / _CONFIG_FILE}"
        )
    largest = _largest_id(model)
    require(largest < 2**31 - 1, f"{path}: has the token id {largest}; ids are below {2**31 - 1}")
    added = model.get_added_tokens_decoder().items()

    def tokenize(text: str) -> list[int]:
        with as_user_error(f"{path}: cannot encode a text"):
            return model.encode(text, add_special_tokens=False).ids

    return Tokenizer(
        vocab_size=largest + 1,
        eod=eod,
        tokenize=tokenize,
        detokenize=lambda ids: model.decode(ids, skip_special_tokens=False),
        sha256=hashlib.sha256(content).hexdigest(),
        special_tokens={i: token.content for i, token in added if token.special} | {eod: eod_token},
    )


def _eod_token(folder: Path) -> str:
    path = folder / _CONFIG_FILE
    if not path.is_file():
        return END_OF_TEXT
    config = read_object(path)
    if isinstance(config.get("eos_token"), dict):
        return Entries(config["eos_token"], f"{path}: eos_token").string("content")
    return Entries(config, str(path)).string("eos_token", END_OF_TEXT)


def _read(path: Path) -> tuple[tokenizers.Tokenizer, bytes]:
    """Return the tokenizer of a tokenizer.json, and the file's content."""
    content = read_small(path)
    with as_user_error(f"{path}: not a tokenizer of the tokenizers library"):
        return tokenizers.Tokenizer.from_buffer(content), content


def _largest_id(model: tokenizers.Tokenizer) -> int:
    """Return the largest token id; ids may have gaps."""
    return max(model.get_vocab(with_added_tokens=True).values(), default=0)


def ids_beyond_model(folder: Path, largest: int | None = None) -> str | None:
    """Return a line about token ids for which the model of a Hugging Face folder has no rows.

    ``largest`` is the largest id that is used; None for the tokenizer's. None is returned where the
    folder's tokenizer.json or config.json is missing or cannot be read.
    """
    try:
        if largest is None:
            largest = _largest_id(_read(folder / _MODEL_FILE)[0])
        rows = Entries(read_object(folder / "config.json"), "").integer("vocab_size")
    except UserError:
        return None
    if largest < rows:
        return None
    return (
        f"{folder}: token ids go up to {largest}, but the model has {rows} rows (vocab_size of "
        f"config.json); training it on these ids needs --padded-vocab-size {largest + 1} or more"
    )


def train_tokenizer(documents: Iterable[str], vocab_size: int, output: Path) -> int:
    """Train a byte-level BPE on ``documents`` and write it to the folder ``output``.

    The alphabet is all 256 bytes, so every text can be encoded; the same documents in the same
    order give the same tokenizer. Returns the size reached, which is below ``vocab_size`` where
    the documents hold too few different pairs. Raises UserError for a size out of 257 to 2**22.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + 1
    require(
        smallest <= vocab_size <= _MOST_TOKENS,
        f"--vocab-size {vocab_size}: at least {smallest} (256 bytes, 1 special), at most "
        f"{_MOST_TOKENS}",
    )
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    model.train_from_iterator(documents, trainer=trainer)
    output.mkdir(parents=True, exist_ok=True)
    with closing(FolderLock(output, f"--output {output}")):
        check_output(output)
        with replacing(output / _MODEL_FILE) as file:
            file.write(model.to_str(pretty=True).encode() + b"\n")
            file.flush()
            # Its name comes first: it tells that the other file is this command's.
            replace_text(output / _CONFIG_FILE, _CONFIG)
    return model.get_vocab_size()


def check_output(output: Path) -> None:
    """Raise UserError if a folder holds a tokenizer that :func:`train_tokenizer` did not write."""
    model, config = tokenizer_files(output)
    is_written_here = config.is_file() and config.read_text(errors="replace") == _CONFIG
    for file in (config, model):
        require(
            is_written_here or not os.path.lexists(file),
            f"--output {output}: {file.name} exists and is not of lowbit-tokenizer; give another "
            "folder",
        )
