"""Errors of a source are one line, before anything is written."""

import json
import pickle
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_llama import CONFIG, refused, write_llama
from training_runs import change_args

from megatron_lowbit.checkpoints.reader import CheckpointReader
from megatron_lowbit.conversion.command import main
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.errors import UserError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def source(tmp_path):
    """A folder to spoil, in several files."""
    return tmp_path / "source"


@pytest.fixture
def checkpoint(source, tmp_path):
    """A checkpoint to spoil, the only folder that there is."""
    write_llama(source)
    to_megatron(source, tmp_path / "checkpoint")
    shutil.rmtree(source)
    return tmp_path / "checkpoint"


def test_a_missing_file(source):
    write_llama(source, shard_bytes=20_000)
    (source / "1.safetensors").unlink()
    refused(source, r"1\.safetensors is missing: model\.safetensors\.index\.json names it")


def test_weights_in_a_file_that_the_index_does_not_name(source, tmp_path):
    """transformers reads only that file, however many the index names."""
    write_llama(source)
    shutil.copy(source / "0.safetensors", source / "model.safetensors")
    refused(
        source,
        r"holds model.safetensors, .* and model.safetensors.index.json, which names other",
    )
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("0.safetensors", "model.safetensors"))
    to_megatron(source, tmp_path / "out")


def test_pickled_weights_are_not_read(source):
    write_llama(source)
    for file in [*source.glob("*.safetensors"), *source.glob("*.index.json")]:
        file.unlink()
    refused(source, r"holds neither .* nor model\.safetensors$")
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(source, "nor model.safetensors; save its pickled weights as safetensors$")


@pytest.mark.parametrize("length", [-1, 1000, 4, 0])
def test_a_truncated_file(source, length):
    """By one byte, in the data, in the head, empty."""
    write_llama(source, shard_bytes=20_000)
    file = source / "1.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    refused(source, r"1\.safetensors: cut short, or not a safetensors file")


def test_a_file_with_two_tensors_of_a_name(source):
    write_llama(source)
    file = source / "0.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    head, data = file.read_bytes()[8 : 8 + length], file.read_bytes()[8 + length :]
    head = head.replace(
        b"{", b'{"%s": {"dtype":"F32","shape":[0],"data_offsets":[0,0]},' % HEAD.encode(), 1
    )
    file.write_bytes(len(head).to_bytes(8, "little") + head + data)
    refused(source, r"0\.safetensors: not valid JSON \(a second key 'lm_head\.weight'\)")


def test_a_tensor_in_two_files(source):
    """transformers reads both files, whatever the index says."""
    write_llama(source, shard_bytes=20_000)
    tensors = load_file(source / "0.safetensors") | {HEAD: torch.zeros(100, 32)}
    save_file(tensors, source / "0.safetensors")
    refused(source, rf"0\.safetensors: holds {HEAD}, which .*index\.json says is in \d\.safet")


def test_a_tensor_that_the_index_has_and_the_file_has_not(source):
    write_llama(source, shard_bytes=20_000)
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][HEAD] = "0.safetensors"
    index.write_text(json.dumps(content))
    refused(source, r"0\.safetensors: holds no lm_head\.weight, which .*index\.json says is there")


UP, LAYER = "model.layers.1.mlp.up_proj.weight", "model.layers.1."
TIED, EVERY_HEAD = {"tie_word_embeddings": True}, {"num_key_value_heads": 4}
ROWS, WIDTH = "rows; config.json says", r"; config\.json says (32|48) input features"
ALIKE = r"is of another shape or dtype than .*layers\.0\."


def matrices(rows: int, *parts: str) -> dict[str, torch.Tensor]:
    """Return tensors of all layers that Megatron-LM joins, each with 24 columns."""
    names = [f"model.layers.{layer}.{part}_proj.weight" for layer in range(3) for part in parts]
    return {name: torch.rand(rows, 24) for name in names}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (TIED, {HEAD: torch.rand(100, 32)}, rf"{HEAD} differs from {EMBEDDING}, but config\.json"),
        ({}, {HEAD: None}, rf'no tensor {HEAD}.*not tied; "tie_word_embeddings": true takes'),
        ({}, {EMBEDDING: torch.rand(96, 32)}, f"{EMBEDDING} has 96 {ROWS} 100$"),
        ({}, {HEAD: torch.rand(96, 32)}, f"{HEAD} has 96 {ROWS} 100$"),
        ({}, {EMBEDDING: torch.rand(112, 32)},
         rf"112 {ROWS} 100 \(vocab_size\); rows without tokens need pad_vocab_size_multiple"),
        ({"pad_vocab_size_multiple": 64}, {HEAD: torch.rand(112, 32)}, f"112 {ROWS} 100"),
        ({}, {EMBEDDING: torch.rand(100, 24)}, rf"{EMBEDDING} is \[100, 24\]{WIDTH}"),
        ({}, {HEAD: torch.rand(100, 24)}, rf"{HEAD} is \[100, 24\]{WIDTH}"),
        ({}, {UP: torch.rand(48, 16)},
         r"up_proj\.weight is \[48, 16\] .* does not fit .*gate_proj\.weight"),
        ({}, {UP: torch.rand(48, 32).bfloat16()},
         r"up_proj\.weight is \[48, 32\] torch\.bfloat16 and does not fit"),
        ({}, matrices(48, "mlp.gate", "mlp.up"), rf"is \[48, 24\]{WIDTH}"),
        ({}, matrices(32, "mlp.down"), rf"is \[32, 24\]{WIDTH}"),
        (EVERY_HEAD, matrices(32, "self_attn.q", "self_attn.k", "self_attn.v"),
         rf"is \[32, 24\]{WIDTH}"),
        ({}, matrices(32, "self_attn.o"), rf"is \[32, 24\]{WIDTH}"),
        # Layers that cannot be stacked, whose checkpoint could not be read.
        ({}, {f"{LAYER}mlp.down_proj.weight": torch.rand(32, 48).bfloat16()}, ALIKE),
        ({}, {f"{LAYER}post_attention_layernorm.weight": torch.rand(32, 40)}, ALIKE),
        ({}, {f"{LAYER}input_layernorm.weight": torch.rand(32, 1)}, ALIKE),
        ({}, {f"{LAYER}input_layernorm.weight": torch.rand(32).double()}, ALIKE),
        ({}, {"model.norm.weight": torch.ones(32).int()},
         r"model\.norm\.weight is torch\.int32; a weight is torch\.float64 or"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(source, config, tensors, message):
    write_llama(source, config, **tensors)
    refused(source, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 5}, r"no tensor model\.layers\.3"),
        ({"num_hidden_layers": 2}, r"tensor model\.layers\.2.* has no place"),
        ({"intermediate_size": 40}, "48 rows; config.json says 40"),
    ],
)
def test_tensors_of_another_model(source, change, message):
    write_llama(source)
    (source / "config.json").write_text(json.dumps(CONFIG | change))
    refused(source, message)


def test_tied_with_the_embedding_again_as_head(source, tmp_path):
    embedding = torch.rand(100, 32)
    twice = {EMBEDDING: embedding, HEAD: embedding.clone()}
    write_llama(source, {"tie_word_embeddings": True}, **twice)
    to_megatron(source, tmp_path / "out")
    keys = CheckpointReader(tmp_path / "out" / "iter_0000000").model.keys()
    assert "embedding.word_embeddings.weight" in keys and "output_layer.weight" not in keys


def test_a_vocabulary_that_is_padded_as_the_model_says(source, tmp_path):
    """Its rows without tokens do not come along."""
    padded = {name: torch.rand(112, 32) for name in (EMBEDDING, HEAD)}
    write_llama(source, {"pad_vocab_size_multiple": 16}, **padded)
    to_megatron(source, tmp_path / "out")
    tensors = CheckpointReader(tmp_path / "out" / "iter_0000000")
    seen = tensors.read_part("embedding.word_embeddings.weight", (0, 0), (100, 32))
    assert tuple(tensors.model["output_layer.weight"].size) == (100, 32)
    assert torch.equal(seen, padded[EMBEDDING][:100])


def test_a_checkpoint_of_another_shape_than_it_says(checkpoint):
    """Too few rows for the vocabulary, and of another width."""
    refused(checkpoint, "--vocab-size 104: .* has 100 rows", to_hugging_face, *[None] * 5, 104)
    change_args(checkpoint / "iter_0000000", ffn_hidden_size=40)
    refused(checkpoint, r"linear_fc1\.weight is \[96, 32\]", to_hugging_face)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qk_l2_norm": True}, "qk_l2_norm True; conversion knows False"),
        ({"window_size": (128, 1)}, r"window_size \(128, 1\); a Mistral has 0 tokens ahead"),
        (
            {"rotary_percent": 0.5, "add_bias_linear": True},
            r"rotary_percent 0\.5; a Llama has 1\.0",
        ),
        ({"num_layers": "x"}, "num_layers 'x': must be an integer from 1 to 1024"),
        ({"num_layers": 10**9}, "num_layers 1000000000: must be an integer from 1 to 1024"),
        (
            {"num_experts": 10**9, "moe_router_topk": 1, "moe_ffn_hidden_size": 8},
            "num_experts 1000000000: must be an integer",
        ),
        ({"hidden_size": True}, "hidden_size True: must be an integer"),
        ({"kv_channels": None}, "needs the entry 'kv_channels'"),
        ({"rotary_base": float("nan")}, "rotary_base nan: must be a finite number above 0"),
        ({"vocab_size": "9"}, "vocab_size '9': must be an integer"),
        ({"hybrid_layer_pattern": [1]}, r"hybrid_layer_pattern \[1\]: must be a string"),
        ({"num_layers": 4}, r"layer_norm_weight is \[3, 32\].*first axes should be \[4\]"),
    ],
)
def test_a_model_that_no_family_has(checkpoint, change, named):
    change_args(checkpoint / "iter_0000000", **change)
    refused(checkpoint, named, to_hugging_face)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("layout", "recipe"), [("compressed-tensors", "nvfp4"),
                                                ("fp8-blocks", "fp8-tile")])  # fmt: skip
def test_weights_that_are_not_finite_are_not_quantized(source, tmp_path, value, layout, recipe):
    weight = torch.rand(32, 32)
    weight[3, 5] = value
    write_llama(source, **{"model.layers.1.self_attn.o_proj.weight": weight})
    to_megatron(source, tmp_path / "checkpoint")
    shutil.rmtree(source)
    message = r"layers\.1\.self_attention\.linear_proj: its weight has infinities or NaN"
    quantized = QuantizedAs(layout, [recipe], [], None)
    export = partial(to_hugging_face, quantized=quantized)
    refused(tmp_path / "checkpoint", message, export)


def test_values_that_a_dtype_does_not_hold(source, tmp_path):
    """A finite value that would become infinite is named; infinite ones stay."""
    write_llama(source, **{EMBEDDING: torch.full((100, 32), -1e5)})
    to_megatron(source, tmp_path / "checkpoint")
    shutil.rmtree(source)
    message = f"{EMBEDDING}: a value is beyond 65504, .* torch.float16; give --dtype bfloat16"
    refused(tmp_path / "checkpoint", message, to_hugging_face, "float16")
    to_hugging_face(tmp_path / "checkpoint", tmp_path / "out", "bfloat16")
    write_llama(source, **{EMBEDDING: torch.full((100, 32), torch.inf)})
    to_megatron(source, tmp_path / "infinite")
    to_hugging_face(tmp_path / "infinite", tmp_path / "also", "float16")


def test_a_folder_to_carry_that_holds_nothing(checkpoint, tmp_path):
    carry = partial(to_hugging_face, companions=tmp_path / "checkpoint" / "nothing")
    refused(checkpoint, "--carry .*nothing: holds neither a tokenizer nor config.json", carry)


def test_tokens_to_verify_without_verifying(checkpoint):
    with pytest.raises(UserError, match="--verify-tokens needs --verify"):
        main(["to-hugging-face", str(checkpoint), "out", "--verify-tokens", "1"])


def test_a_file_that_changed_is_refused(checkpoint):
    file = checkpoint / "iter_0000000" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    refused(checkpoint, r"__0_0\.distcp: its content differs", to_hugging_face)


def test_a_common_state_that_could_run_code_is_refused(checkpoint):
    path = checkpoint / "iter_0000000"
    (path / "common.pt").write_bytes(pickle.dumps({"args": print}))
    (path / "lowbit.json").unlink()
    refused(checkpoint, r"common\.pt: refused", to_hugging_face)
