"""Vocabulary of a GGUF file, from a tokenizer.json of byte-level pairs (Llama 3, Qwen, GPT-2).

llama.cpp has the patterns that split text before pairs are merged in its code, by name; a tokenizer
with another pattern has none there.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries, read_object

if TYPE_CHECKING:
    from gguf import GGUFWriter

TOKENIZER = "tokenizer.json"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    f"{_ENDINGS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    f"{_ENDINGS}|{_WORDS}|\\p{{N}}|{_REST}": "qwen2",
}
"""llama.cpp's names of patterns: of Llama 3, with up to three digits, and of Qwen 2 and 3."""


def add_vocabulary(writer: "GGUFWriter", folder: Path, size: int) -> None:
    """Add the tokens of a folder's tokenizer.json.

    Raises UserError without that file, or with a tokenizer that llama.cpp has not: its server
    aborts on a file without a vocabulary.
    """
    from gguf import SpecialVocab

    path = folder / TOKENIZER
    document = Entries(read_object(path), str(path))
    pattern = _pattern(document)
    if pattern is None:
        known = "byte-level pairs with the pattern of GPT-2, Llama 3 or Qwen"
        raise UserError(f"{path}: to-gguf converts {known}, and no other tokenizer")
    tokens, types = _tokens(document, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pattern)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = SpecialVocab(folder, load_merges=True, n_vocab=size)
    # For some patterns llama.cpp begins a text with a token unless told otherwise.
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _pattern(document: Entries) -> str | None:
    """Return llama.cpp's name of a tokenizer's pattern; None where it has none."""
    steps = document.inner("pre_tokenizer").objects("pretokenizers")
    steps = steps or [document.inner("pre_tokenizer")]
    last = steps[-1]
    is_byte_level = last.string("type", "none") == "ByteLevel"
    if document.inner("model").string("type", "none") != "BPE" or not is_byte_level:
        return None
    if last.boolean("add_prefix_space", True):
        return None
    if len(steps) == 1:
        return "gpt-2" if last.boolean("use_regex", True) else None
    pattern = steps[0].inner("pattern").string("Regex", "none")
    return _PATTERNS.get(pattern) if len(steps) == 2 else None


def _tokens(document: Entries, size: int) -> tuple[list[str], list[int]]:
    """Return text and kind of each row of the embedding; rows without a token are unused."""
    from gguf import TokenType

    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [int(TokenType.UNUSED)] * size
    vocabulary = document.inner("model").inner("vocab")
    entries = [
        (text, vocabulary.integer(text, least=0, most=size - 1), TokenType.NORMAL)
        for text in vocabulary
    ]
    for added in document.objects("added_tokens"):
        kind = TokenType.CONTROL if added.boolean("special") else TokenType.USER_DEFINED
        number = added.integer("id", least=0, most=size - 1)
        entries.append((added.string("content"), number, kind))
    for text, number, kind in entries:
        tokens[number], types[number] = text, int(kind)
    return tokens, types
