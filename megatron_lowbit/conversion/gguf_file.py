"""GGUF files, llama.cpp's format: a folder of Hugging Face's with the codes and scales it has.

No weight is quantized here. Weights of compressed-tensors' NVFP4, MXFP4 and INT4 become blocks of
ggml, llama.cpp's library of tensors; matrices in high precision keep their dtype, vectors become
FP32, which ggml needs. Queries and keys of a Llama get their rows in another order: ggml rotates
neighbours, Hugging Face the halves of a head. NVFP4's tensor scale is a separate tensor, by
which llama.cpp multiplies the product. The vocabulary comes from a tokenizer.json of byte-level
pairs (Llama 3, Qwen, GPT-2).

A block starts with its scales, then has its codes, two in a byte: element j in the low nibble,
j + n/2 in the high one, of n elements. Codes and scales keep their values; they are only moved.

    MXFP4  32 elements: an E8M0 byte, 16 bytes of E2M1 codes
    NVFP4  64 elements: four E4M3 bytes, a scale for each 16; four times 8 bytes of E2M1 codes
    Q4_0   32 elements: an FP16 scale, 16 bytes of integers plus 8

Sources: llama.cpp's ``convert_hf_to_gguf.py`` for names and metadata; ggml-common.h for blocks
(``block_mxfp4``, ``block_nvfp4``, ``block_q4_0``).
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG, companion_files
from megatron_lowbit.conversion.convert import check_names, lazy_chunks
from megatron_lowbit.conversion.families import from_config
from megatron_lowbit.conversion.families.rope import LLAMA3_ROPE
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.conversion.quantized_folder import QuantizedFolder
from megatron_lowbit.errors import UserError, as_user_error, error_prefix, require
from megatron_lowbit.json_files import Entries, read_object
from megatron_lowbit.numerics.formats import E8M0_NAN, unpack_nibbles
from megatron_lowbit.storage.lock import output_lock

if TYPE_CHECKING:
    from gguf import GGUFWriter


def mxfp4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Pack codes (R, K/2) and E8M0 scales (R, K/32), uint8, into bytes (R, K/32 * 17)."""
    _check_scales(scales, E8M0_NAN, "E8M0")
    return torch.cat([scales.unsqueeze(-1), _in_halves(codes, 32)], dim=-1).flatten(1)


def nvfp4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Pack codes (R, K/2), uint8, and E4M3 scales (R, K/16) into bytes (R, K/64 * 36)."""
    scales = scales.view(torch.uint8)
    _check_scales(scales, 0x7F, "E4M3")
    columns = 2 * codes.shape[1]
    require(
        columns % 64 == 0, f"{columns} columns are not whole blocks of 64, as NVFP4 has in ggml"
    )
    quarters = _in_halves(codes, 16).unflatten(1, (-1, 4)).flatten(2)
    return torch.cat([scales.unflatten(1, (-1, 4)), quarters], dim=-1).flatten(1)


def q4_0_blocks(words: Tensor, scales: Tensor) -> Tensor:
    """Pack int32 words of eight codes (R, K/8) and scales (R, K/G) into bytes (R, K/32 * 18).

    Scales of groups of G, a multiple of 32, are repeated. Raises UserError for a scale that is no
    FP16 number; of BF16 scales these are those from 65536 and most below 2**-17.
    """
    codes = words.view(torch.uint8)
    repeats, rest = divmod(2 * codes.shape[1], 32 * scales.shape[1])
    require(rest == 0, "groups of integers are not whole blocks of 32, as Q4_0 has in ggml")
    halves = scales.to(torch.float16)
    exact = scales.is_meta or bool((halves.to(scales.dtype) == scales).all())
    require(exact, "a scale is no FP16 number, which Q4_0 has in ggml")
    repeated = halves.repeat_interleave(repeats, dim=1).unsqueeze(-1).view(torch.uint8)
    return torch.cat([repeated, _in_halves(codes, 32)], dim=-1).flatten(1)


def _in_halves(codes: Tensor, block: int) -> Tensor:
    """Pack pairs of neighbours (R, K/2) as pairs half a block apart (R, K/block, block/2)."""
    low, high = unpack_nibbles(codes).unflatten(1, (-1, block)).chunk(2, dim=-1)
    pairs: Tensor = low | (high << 4)
    return pairs


def _check_scales(scales: Tensor, first_refused: int, name: str) -> None:
    is_good = scales.is_meta or bool((scales < first_refused).all())
    require(is_good, f"a scale is NaN or negative, which {name} scales in ggml are not")


ARCHITECTURES = {"Llama": "llama", "Qwen3": "qwen3"}
"""llama.cpp's names of families."""
_METADATA = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_layers", "feed_forward_length": "ffn_hidden_size",
    "head_count": "num_attention_heads", "head_count_kv": "num_query_groups",
    "key_length": "kv_channels", "value_length": "kv_channels",
    "rope_dimension_count": "kv_channels", "rope_freq_base": "rotary_base",
    "layer_norm_rms_eps": "layernorm_epsilon", "vocab_size": "vocab_size",
}  # fmt: skip
"""Megatron-LM's arguments by GGUF's names."""
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_BLOCKS: Mapping[tuple[str, ...], tuple[str, Callable[..., Tensor]]] = {
    ("weight_packed", "weight_scale"): ("MXFP4", mxfp4_blocks),
    ("weight_packed", "weight_scale", "weight_global_scale"): ("NVFP4", nvfp4_blocks),
    ("weight_packed", "weight_scale", "weight_shape"): ("Q4_0", q4_0_blocks),
}
"""ggml's types, and functions from codes and scales to blocks, by the tensors of a weight."""


GGUFTensor = tuple[str, str, Tensor]
"""Name of a tensor of a file, ggml's type, and its bytes, uint8 (..., bytes of a row)."""


class GGUFSummary(NamedTuple):
    """Content of a written file: the family, and the number of matrices by ggml's type."""

    family: str
    types: Mapping[str, int]


def to_gguf(source: Path, output: Path, force: bool = False) -> GGUFSummary:
    """Convert a folder of Hugging Face's into a GGUF file.

    Raises UserError, and leaves nothing, where llama.cpp has not this family, quantization or
    tokenizer, where a scale is no number of ggml's, or where ``output`` would replace a file that
    is not GGUF, or without ``force`` any file.
    """
    try:
        import gguf
    except ImportError:
        raise UserError("to-gguf needs gguf: pip install 'megatron-lowbit[serve]'") from None
    _check_output(output, force)
    companion_files(source)
    folder = QuantizedFolder(source)
    converted = from_config(folder.config, str(source / CONFIG))
    known = " and ".join(ARCHITECTURES)
    require(converted.name in ARCHITECTURES, f"to-gguf converts {known}, not {converted.name}")
    model = converted.model
    is_scaled = model["rotary_seq_len_interpolation_factor"] or "yarn_beta_fast" in model
    require(not is_scaled, f"{source}: to-gguf writes rope_type 'default' and 'llama3' alone")
    require(not model["add_bias_linear"], f"{source}: to-gguf converts no biases")
    require(not model.get("window_size"), f"{source}: to-gguf converts no sliding windows")
    check_names(folder, converted.rules)
    for rule in converted.rules:
        lazy_chunks(folder, rule)  # checks shapes
    outlines = list(_tensors(folder, converted, outline=True))
    partial = output.with_name(f".{output.name}.partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURES[converted.name])
    for entry, argument in _METADATA.items():
        getattr(writer, f"add_{entry}")(model[argument])
    with as_user_error(f"{source}: its tokenizer cannot be read"):
        add_vocabulary(writer, source, model["vocab_size"])
    with closing(output_lock(output)):
        try:
            partial.unlink(missing_ok=True)  # It might be a link.
            size = _write(writer, outlines, _tensors(folder, converted))
            require(partial.stat().st_size == size, f"{partial}: not the {size} bytes written")
            _check_output(output, force)
            partial.replace(output)
        except OSError as error:
            raise UserError(f"{output}: cannot be written ({error.strerror or error})") from None
        finally:
            partial.unlink(missing_ok=True)
    matrices = [type for _, type, outline in outlines if outline.ndim > 1]
    types = {type: matrices.count(type) for type in dict.fromkeys(matrices)}
    return GGUFSummary(converted.name, types)


def _check_output(output: Path, force: bool) -> None:
    """Raise UserError unless the output is a new file or, with ``force``, an older GGUF file."""
    if not os.path.lexists(output):
        return
    require(force, f"{output} exists; --force replaces it")
    is_gguf = False
    if output.is_file() and not output.is_symlink():
        with suppress(OSError), output.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    require(is_gguf, f"{output} is not a GGUF file; --force replaces only those")


def _write(
    writer: "GGUFWriter", outlines: Iterable[GGUFTensor], tensors: Iterable[GGUFTensor]
) -> int:
    """Write metadata and tensors, one tensor in memory at a time; return the number of bytes."""
    from gguf import GGMLQuantizationType

    for name, type, outline in outlines:
        byte, ggml_type = np.dtype("uint8"), GGMLQuantizationType[type]
        writer.add_tensor_info(name, outline.shape, byte, outline.nbytes, ggml_type)
    try:
        writer.write_header_to_file()
        with as_user_error(f"{writer.path}: the text of a tokenizer cannot be written"):
            writer.write_kv_data_to_file()  # encodes its text
        writer.write_ti_data_to_file()
        for _, _, tensor in tensors:
            writer.write_tensor_data(tensor.numpy())
        [stream] = writer.fout or []
        stream.flush()
        os.fsync(stream.fileno())
        return stream.tell()
    finally:
        writer.close()


def _tensors(
    folder: QuantizedFolder, converted: ConvertibleModel, outline: bool = False
) -> Iterator[GGUFTensor]:
    """Yield the tensors of a file: read one at a time, or outlines on the ``meta`` device."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    model, architecture = converted.model, MODEL_ARCH[ARCHITECTURES[converted.name].upper()]
    gguf_names = get_tensor_name_map(architecture, model["num_layers"])
    for name in (name for rule in converted.rules for name in rule.names):
        parts, gguf_name = folder.parts(name), gguf_names.get_name(name, (".weight",))
        if gguf_name is None:
            raise UserError(f"{folder.path}: llama.cpp has no name for {name}")
        stored = [folder.stored(part, outline) for part in parts]
        endings = tuple(part.rpartition(".")[2] for part in parts)
        if endings == ("weight",) and stored[0].dtype in _PLAIN:
            tensor = stored[0].float() if stored[0].ndim == 1 else stored[0]
            type, rows = _PLAIN[tensor.dtype], _bytes(tensor)
        elif endings in _BLOCKS:
            type, encode = _BLOCKS[endings]
            with error_prefix(f"{folder.path}: {name}: "):
                rows = encode(*stored[:2])
        else:
            listed = ", ".join(endings)
            raise UserError(f"{folder.path}: llama.cpp has no type for {name} ({listed})")
        order = _rotary_order(name, model) if converted.name == "Llama" else None
        yield gguf_name, type, rows if order is None else rows[order]
        if type == "NVFP4":
            yield gguf_name.removesuffix("weight") + "scale", "F32", _bytes(1.0 / stored[2])
    if model.get("use_rope_scaling"):
        yield "rope_freqs.weight", "F32", _bytes(_rope_factors(model))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _rotary_order(name: str, model: Model) -> Tensor | None:
    """Return the rows of queries or keys with the two halves of each head in turn."""
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_query_groups")):
        if f".{projection}." in name:
            rows = torch.arange(model[heads] * model["kv_channels"])
            return rows.view(model[heads], 2, -1).transpose(1, 2).flatten()
    return None


def _rope_factors(model: Model) -> Tensor:
    """Return the divisors of the rotary frequencies, FP32 (kv_channels/2).

    Source: Llama 3.1's scaling. Wavelengths above ``original / low`` are divided by ``factor``,
    those below ``original / high`` by 1; between them frequencies are interpolated.
    """
    fixed, factor = LLAMA3_ROPE, model["rope_scaling_factor"]
    low, high = fixed["low_freq_factor"], fixed["high_freq_factor"]
    exponents = torch.arange(0, model["kv_channels"], 2, dtype=torch.float64)
    wavelengths = 2 * math.pi * model["rotary_base"] ** (exponents / model["kv_channels"])
    turns = fixed["original_max_position_embeddings"] / wavelengths
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return factors.float()


TOKENIZER = "tokenizer.json"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    f"{_ENDINGS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    f"{_ENDINGS}|{_WORDS}|\\p{{N}}|{_REST}": "qwen2",
}
"""llama.cpp's names of the patterns that split text: of Llama 3, and of Qwen 2 and 3."""


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
    """Return text and type of each row of the embedding; rows without a token are unused."""
    from gguf import TokenType

    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [int(TokenType.UNUSED)] * size
    vocabulary = document.inner("model").inner("vocab")
    entries = [
        (text, vocabulary.integer(text, minimum=0, maximum=size - 1), TokenType.NORMAL)
        for text in vocabulary
    ]
    for added in document.objects("added_tokens"):
        type = TokenType.CONTROL if added.boolean("special") else TokenType.USER_DEFINED
        number = added.integer("id", minimum=0, maximum=size - 1)
        entries.append((added.string("content"), number, type))
    for text, number, type in entries:
        tokens[number], types[number] = text, int(type)
    return tokens, types
