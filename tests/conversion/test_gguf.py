"""GGUF files: the bits of exported weights, read back with gguf, and llama.cpp's logits of them."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_llama import write_llama
from tiny_models import LLAMA3, make_model, weights

from megatron_lowbit.conversion.command import main
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.gguf_file import mxfp4_blocks, nvfp4_blocks, q4_0_blocks, to_gguf
from megatron_lowbit.conversion.layouts.layout import decode_blocks
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.conversion.quantized_folder import QuantizedFolder
from megatron_lowbit.errors import UserError
from tests.marks import others_slow

gguf = pytest.importorskip("gguf")
EXAMPLE = Path(__file__).parents[2] / "examples" / "fine_tune_and_serve.py"
TEXT = "It's 2026:\n\n  12345 naïve words, 'quoted' \t and so_on(…) 漢字 !!\r\n end "
VOCABULARY = 384
PROMPTS = torch.arange(3, 33).view(5, 6)
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1,
    "max_position_embeddings": 64, "rms_norm_eps": 3e-6, "tie_word_embeddings": False,
}  # fmt: skip
RECIPES = {"qat-nvfp4": "NVFP4", "qat-mxfp4": "MXFP4", "qat-int4-g32": "Q4_0"}
PARTS = {"attn_q": "self_attn.q", "attn_k": "self_attn.k", "attn_v": "self_attn.v",
         "attn_output": "self_attn.o", "ffn_gate": "mlp.gate", "ffn_up": "mlp.up",
         "ffn_down": "mlp.down"}  # fmt: skip


def tokenizer(folder: Path, split: str | None = None) -> None:
    """Save a tokenizer of pairs, whose words a pattern splits; by default GPT-2's."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    pairs.pre_tokenizer = bytes_alone
    if split is not None:
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        pairs.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_alone])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4, special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    pairs.train_from_iterator([TEXT * 3, "words in 12 345 lines\n" * 3], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<|end|>")
    wrapped.add_tokens(["[[name]]"])
    wrapped.save_pretrained(folder)


def write_model(folder: Path, model_type: str = "llama", rope: dict | None = None) -> None:
    """Save a random model of transformers' with a tokenizer."""
    torch.manual_seed(0)
    rope = rope or {"rope_type": "default", "rope_theta": 50000.0}
    model = make_model(model_type, **CONFIG, rope_parameters=rope)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms drawn as they are could be exchanged
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer(folder)


def served(folder: Path, recipe: str, *changes: str, **model) -> Path:
    """Export a model by a recipe and convert it; return the folder of Hugging Face's."""
    write_model(folder / "model", **model)
    to_megatron(folder / "model", folder / "start")
    wanted = QuantizedAs("compressed-tensors", [recipe], changes)
    to_hugging_face(folder / "start", folder / "served", quantized=wanted)
    return folder / "served"


def read_gguf(file: Path) -> dict:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def rows_as_stored(name: str, tensor: torch.Tensor, heads: dict[str, int]) -> torch.Tensor:
    """Return rows of queries or keys as Hugging Face has them: the halves of each head apart."""
    count = heads.get(name.split(".")[-2])
    if count is None:
        return tensor
    return tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_are_those_of_the_export(recipe, tmp_path):
    """Read back with gguf's reader, unpacked here, against the tensors of compressed-tensors."""
    folder = served(tmp_path, recipe)
    to_gguf(folder, tmp_path / "served.gguf")
    stored, expected = read_gguf(tmp_path / "served.gguf"), weights(folder)
    heads, count = {"attn_q": 4, "attn_k": 2}, 0
    for layer in range(2):
        for part, module in PARTS.items():
            name, module = f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{module}_proj"
            assert stored[name].tensor_type.name == RECIPES[recipe]
            values = gguf.dequantize(stored[name].data, stored[name].tensor_type)
            codes, scales = (expected[f"{module}.weight_{part}"] for part in ("packed", "scale"))
            if recipe == "qat-int4-g32":
                pairs = codes.view(torch.uint8)
                steps = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1).float() - 8
                decoded = steps * scales.float().repeat_interleave(32, dim=1)
            else:
                decoded = decode_blocks(recipe.removeprefix("qat-"), codes, scales)
            assert torch.equal(rows_as_stored(name, torch.from_numpy(values), heads), decoded), name
            if recipe == "qat-nvfp4":
                scale = torch.from_numpy(stored[f"blk.{layer}.{part}.scale"].data.copy())
                assert torch.equal(scale, 1.0 / expected[f"{module}.weight_global_scale"])
            count += 1
    assert count == 14 and (recipe == "qat-nvfp4") == any(n.endswith(".scale") for n in stored)


def test_gguf_dequantizes_blocks_to_the_same_values():
    """The reference decoder of the package gguf, on all codes and on scales of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8, generator=generator)
    types = gguf.GGMLQuantizationType
    exponents = torch.arange(256).view(64, 4).clamp(max=250).to(torch.uint8)
    values = gguf.dequantize(mxfp4_blocks(codes, exponents).numpy(), types.MXFP4)
    assert torch.equal(torch.from_numpy(values), decode_blocks("mxfp4", codes, exponents))
    e4m3 = (torch.arange(512).view(64, 8) % 0x7F).to(torch.uint8).view(torch.float8_e4m3fn)
    values = gguf.dequantize(nvfp4_blocks(codes, e4m3).numpy(), types.NVFP4)
    assert torch.equal(torch.from_numpy(values), decode_blocks("nvfp4", codes, e4m3))
    # Groups of 128: one scale for four blocks.
    scales = torch.linspace(-3, 3, 64).exp().bfloat16().view(64, 1)
    values = gguf.dequantize(q4_0_blocks(codes.view(torch.int32), scales).numpy(), types.Q4_0)
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).float() - 8
    assert torch.equal(torch.from_numpy(values), pairs * scales.float())


@pytest.mark.parametrize(
    ("scale", "is_held"),
    [(2.0**-17 * 1.9921875, True), (2.0**-20, True), (65280.0, True), (0.0, True),
     (2.0**-18 * 1.9921875, False), (2.0**-26, False), (65536.0, False), (float("nan"), False)],
)  # fmt: skip
def test_scales_that_fp16_holds(scale, is_held):
    words, scales = torch.zeros(1, 4).int(), torch.full((1, 1), scale, dtype=torch.bfloat16)
    if is_held:
        assert q4_0_blocks(words, scales)[0, :2].view(torch.float16).item() == scale
        return
    with pytest.raises(UserError, match="a scale is no FP16 number"):
        q4_0_blocks(words, scales)


def test_scales_that_ggml_reads_otherwise_are_refused():
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    for scale in (float("nan"), -1.0):
        with pytest.raises(UserError, match="E4M3 scales"):
            nvfp4_blocks(codes, torch.full((1, 4), scale).to(torch.float8_e4m3fn))
    with pytest.raises(UserError, match="E8M0 scales"):
        mxfp4_blocks(codes, torch.tensor([[127, 255]], dtype=torch.uint8))


def expected_logits(folder: Path) -> torch.Tensor:
    """Return transformers' logits in FP32, with inputs of linear layers rounded to ggml's Q8_0.

    Weights are dequantized by this project, inputs rounded by the package gguf.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    opened, q8_0 = QuantizedFolder(folder), gguf.GGMLQuantizationType.Q8_0
    config = AutoConfig.from_pretrained(folder)
    delattr(config, "quantization_config")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name in opened.file_of:
            parameter.data.copy_(opened.dequantized(name).float())

    def round_input(module, inputs):
        rounded = gguf.dequantize(gguf.quantize(inputs[0].numpy(), q8_0), q8_0)
        return torch.from_numpy(rounded).view(inputs[0].shape)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(round_input)
    with torch.no_grad():
        return model(PROMPTS).logits


MODELS = {
    "NVFP4": ("qat-nvfp4", {}),
    "MXFP4, frequencies of Llama 3.1": ("qat-mxfp4", {"rope": LLAMA3}),
    "INT4": ("qat-int4-g32", {}),
    "Qwen3, NVFP4": ("qat-nvfp4", {"model_type": "qwen3"}),
}


@pytest.mark.parametrize("case", others_slow(MODELS, ("NVFP4", "INT4")))
def test_llama_cpp_computes_with_these_weights(case, tmp_path):
    """Its logits belong to the weights and to inputs in Q8_0, but for FP32's order of sums.

    That order may round an input to the next integer. Such a step is seen only in its own prompt,
    and is as small as the rounding to eight bits itself.
    """
    pytest.importorskip("xllamacpp")
    recipe, model = MODELS[case]
    folder, file = served(tmp_path, recipe, **model), tmp_path / "served.gguf"
    to_gguf(folder, file)
    example = runpy.run_path(str(EXAMPLE))
    visible = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    differences = [
        example["difference"](
            example["llama_cpp_logits"](file, prompt, VOCABULARY, visible), logits
        )
        for prompt, logits in zip(PROMPTS.tolist(), expected_logits(folder), strict=True)
    ]
    assert sorted(differences)[2] <= 2**-16 and max(differences) <= 2**-5, differences


PATTERNS = {
    "GPT-2": None,
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


ONE_TOKEN = {
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
}


def plain_folder(folder: Path, **changes) -> Path:
    """Write a model that is not quantized, with a tokenizer of one token."""
    write_llama(folder, CONFIG | {"model_type": "llama"} | changes)
    (folder / "tokenizer.json").write_text(json.dumps(ONE_TOKEN))
    return folder


@pytest.mark.parametrize("pattern", PATTERNS)
def test_llama_cpp_has_the_tokenizer_s_tokens(pattern, tmp_path):
    """A text with digits, contractions, white space, other alphabets and added tokens."""
    pytest.importorskip("xllamacpp")
    from transformers import AutoTokenizer

    folder = plain_folder(tmp_path / "model")
    tokenizer(folder, PATTERNS[pattern])
    to_gguf(folder, tmp_path / "model.gguf")
    text = f"{TEXT}<|end|>{TEXT}<|user|>words[[name]]"
    example = runpy.run_path(str(EXAMPLE))
    with example["llama_cpp_server"](tmp_path / "model.gguf") as address:
        question = {"content": text, "add_special": True, "parse_special": True}
        tokens = example["answer"](address, "tokenize", question)["tokens"]
    assert tokens == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert len(set(tokens)) > 20


def test_frequencies_are_those_of_llama_3_1(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = LLAMA3 | {"factor": 32.0}
    folder = plain_folder(tmp_path / "model", rope_parameters=rope, head_dim=64)
    to_gguf(folder, tmp_path / "model.gguf")
    stored = read_gguf(tmp_path / "model.gguf")["rope_freqs.weight"]
    factors = torch.from_numpy(stored.data.copy())
    config = LlamaConfig(**CONFIG | {"head_dim": 64}, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(plain / scaled, factors, rtol=1e-5, atol=0)
    assert factors[0] == 1 and factors[-1] == 32 and ((factors > 1) & (factors < 32)).any()


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    folder, file = plain_folder(tmp_path / "model", tie_word_embeddings=True), tmp_path / "a.gguf"
    main(["to-gguf", str(folder), str(file)])
    written, reader, command = capsys.readouterr().out.splitlines()
    assert written == f"written: {file} (Llama, 15 matrices in F32)"
    assert reader.startswith("loads in: llama.cpp") and command.startswith("next: llama-server")
    assert "output.weight" not in read_gguf(file)  # llama.cpp then takes the embedding
    with pytest.raises(UserError, match="exists; --force replaces it"):
        to_gguf(folder, file)
    before = file.stat().st_ino
    main(["to-gguf", str(folder), str(file), "--force"])
    assert file.stat().st_ino != before and len(list(tmp_path.glob(".*"))) == 0


@pytest.mark.parametrize("name", ["model/0.safetensors", "text", "link", "folder"])
def test_force_replaces_only_gguf_files(name, tmp_path):
    folder, output = plain_folder(tmp_path / "model"), tmp_path / name
    (tmp_path / "text").write_text("precious")
    (tmp_path / "link").symlink_to("model/0.safetensors")
    (tmp_path / "folder").mkdir()
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=f"{output} is not a GGUF file"):
        to_gguf(folder, output, force=True)
    assert {path: path.lstat().st_ino for path in tmp_path.rglob("*")} == before


def test_tied_with_the_embedding_again_as_head(tmp_path):
    """As ``to-megatron`` reads it: a head that is the embedding is ignored."""
    write_model(tmp_path / "model")
    file, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    to_gguf(tmp_path / "model", tmp_path / "tied.gguf")
    assert "output.weight" not in read_gguf(tmp_path / "tied.gguf")
    tensors["lm_head.weight"] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight differs from .*embed_tokens\.weight"):
        to_gguf(tmp_path / "model", tmp_path / "other.gguf")


def test_brain_floats_stay_as_they_are(tmp_path):
    """Matrices keep their dtype; vectors become FP32."""
    folder = plain_folder(tmp_path / "model")
    write_llama(folder, CONFIG | {"model_type": "llama"}, dtype=torch.bfloat16)
    to_gguf(folder, tmp_path / "a.gguf")
    stored, expected = read_gguf(tmp_path / "a.gguf"), weights(folder)
    down, norm = stored["blk.1.ffn_down.weight"], stored["blk.1.ffn_norm.weight"]
    assert (down.tensor_type.name, norm.tensor_type.name) == ("BF16", "F32")
    seen = torch.from_numpy(down.data.copy()).view(torch.bfloat16)
    assert torch.equal(seen, expected["model.layers.1.mlp.down_proj.weight"])
    vector = expected["model.layers.1.post_attention_layernorm.weight"]
    assert torch.equal(torch.from_numpy(norm.data.copy()), vector.float())


REFUSED = {
    "MXFP8": ("qat-mxfp8", {}, r"no type for model.layers.0.self_attn.q_proj.weight \(weight, "),
    "48 columns": ("qat-nvfp4", {"intermediate_size": 48}, "down_proj.weight: 48 columns are not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_ggml_cannot_hold_are_refused(case, tmp_path):
    recipe, changes, message = REFUSED[case]
    plain_folder(tmp_path / "model", **changes)
    to_megatron(tmp_path / "model", tmp_path / "start")
    wanted = QuantizedAs("compressed-tensors", [recipe])
    to_hugging_face(tmp_path / "start", tmp_path / "served", quantized=wanted)
    with pytest.raises(UserError, match=message):
        to_gguf(tmp_path / "served", tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists() and len(list(tmp_path.glob(".*"))) == 0


ALONE = "to-gguf writes rope_type 'default' and 'llama3' alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ALONE),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
         ALONE),
        ({"attention_bias": True, "mlp_bias": True}, "to-gguf converts no biases"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": True,
          "sliding_window": 6}, "to-gguf converts no sliding windows"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 1,
          "n_head": 2, "n_positions": 8}, "to-gguf converts Llama and Qwen3, not GPT-2"),
    ],
)  # fmt: skip
def test_other_models_are_refused(change, message, tmp_path):
    folder = plain_folder(tmp_path / "model", rope_parameters=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        to_gguf(folder, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


OTHER = "and no other tokenizer"
BAD = {
    "a number outside": ({"model": {"type": "BPE", "vocab": {"a": 384}}}, "a 384: must be an int"),
    "no object": ({"model": []}, "model: holds no JSON object"),
    "no list": ({"added_tokens": {}, "model": {"type": "BPE"}}, "added_tokens {}: must be a list"),
    "a space first": ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, OTHER),
    "other words": ({"pre_tokenizer": {"type": "Metaspace"}}, OTHER),
    "other merges": ({"model": {"type": "Unigram"}}, OTHER),
    "another pattern": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "x"}},
        {"type": "ByteLevel", "add_prefix_space": False},
    ]}}, OTHER),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_tokenizers_are_refused(case, tmp_path):
    content, message = BAD[case]
    folder = plain_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(ONE_TOKEN | content))
    with pytest.raises(UserError, match=message):
        to_gguf(folder, tmp_path / "a.gguf")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json is missing"):
        to_gguf(folder, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()
