"""Planned bytes that forward keeps for backward, against those that autograd's hooks count."""

import json
from pathlib import Path

import pytest
from built import parse, saved_bytes

from megatron_lowbit.planning.memory import activation_bytes, quantized_weight_bytes
from megatron_lowbit.planning.model import Amounts, Linear, stages
from megatron_lowbit.recipes import Layer, load_recipe
from tests.marks import others_slow

VOCABULARY = 256
LINEAR = Path(__file__).parents[2] / "benchmarks" / "results" / "linear-h200.json"
LLAMA = (
    "--hidden-size 256 --ffn-hidden-size 640 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 128 "
    "--micro-batch-size 2 --bf16"
)
GPT2 = "--hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --bf16"
HYBRID = (
    "--hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --squared-relu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type none --seq-length 256 --micro-batch-size 2 --bf16 "
    "--mamba-state-dim 16 --mamba-head-dim 32 --mamba-num-groups 2"
)
TP2 = "--tensor-model-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 384"
IN_FP8 = "--activation-func-fp8-input-store"
EVERYWHERE = "--recipe-set bf16_blocks=none"
LAYERS = "--num-layers 1", "--num-layers 2"
MODELS = {
    "bf16": LLAMA,
    "fp8-tile": f"{LLAMA} --fp8-recipe fp8-tile",
    "fp8-tile, fallback": f"{LLAMA} --fp8-recipe fp8-tile --recipe-set fallback=bf16",
    "nvfp4": f"{LLAMA} --fp4-recipe nvfp4 {EVERYWHERE}",
    "mxfp4-backward": f"{LLAMA} --fp4-recipe mxfp4-backward",
    "mxfp8": f"{LLAMA} --precision-recipe mxfp8",
    "fp8-delayed": f"{LLAMA} --precision-recipe fp8-delayed",
    "bf16, TP2": f"{LLAMA} {TP2}",
    "bf16, TP2 and SP": f"{LLAMA} {TP2} --sequence-parallel",
    "nvfp4, TP2": f"{LLAMA} {TP2} --fp4-recipe nvfp4 {EVERYWHERE}",
    "nvfp4, TP2 and SP": f"{LLAMA} {TP2} --sequence-parallel --fp4-recipe nvfp4 {EVERYWHERE}",
    "fp8-tile, TP2 and SP": f"{LLAMA} {TP2} --sequence-parallel --fp8-recipe fp8-tile",
    "fp8-tile, FP8 input of SwiGLU": f"{LLAMA} --fp8-recipe fp8-tile {IN_FP8}",
    "GPT-2": GPT2,
    "GPT-2, nvfp4": f"{GPT2} --fp4-recipe nvfp4 {EVERYWHERE}",
    "experts": f"{LLAMA} {EXPERTS}",
    "experts, deterministic": f"{LLAMA} {EXPERTS} --deterministic-mode",
    "experts, FP8 input of SwiGLU": f"{LLAMA} {EXPERTS} {IN_FP8}",
}
QUICK = (
    "bf16", "fp8-tile, fallback", "nvfp4", "nvfp4, TP2 and SP", "fp8-tile, TP2 and SP", "GPT-2",
    "experts, FP8 input of SwiGLU",
)  # fmt: skip


def planned(args, parts) -> float:
    total = 0.0
    for part, number in parts.items():
        wgrad = part.second.precision.wgrad
        if part.name == "attention" and args.transformer_impl == "transformer_engine":
            # What is measured are local layers, which keep codes of attention's output as well.
            codes = args.micro_batch_size * args.seq_length * part.second.inputs
            if wgrad.rhs is not None and not wgrad.fallback:
                total += number * codes * wgrad.rhs.format.bits_per_element / 8
        total += number * activation_bytes(args, part, scan="torch").total()
        total += number * sum(quantized_weight_bytes(each, True)[1] for each in part.linears)
    return total


def one_more(
    text: str, fewer: str, more: str, monkeypatch, attention: str = "transformer_engine"
) -> tuple[float, float]:
    """Return the bytes that a model keeps in addition to a smaller one: planned and measured."""
    pairs = []
    for size in (fewer, more):
        args = parse(f"{text} {size}")
        recipe = load_recipe(*args.precision_recipe, args.recipe_set)
        saved = saved_bytes(args, VOCABULARY, monkeypatch, attention != "local")
        args.transformer_impl = attention
        pairs.append((planned(args, stages(args, recipe)[0]), sum(saved.values())))
    return tuple(large - small for small, large in zip(*pairs, strict=True))


@pytest.mark.parametrize("name", others_slow(MODELS, QUICK))
def test_a_layer_of_a_gpt_keeps_what_it_saves(name, monkeypatch):
    counted, measured = one_more(MODELS[name], *LAYERS, monkeypatch)
    # Tensor scales, and a mixture's maps of tokens, are not counted one by one.
    assert counted == pytest.approx(measured, rel=0.01)


def test_gated_gelu_keeps_its_factors(monkeypatch):
    """And the sigmoid, uncompiled here."""
    model = LLAMA.replace("--swiglu", "--quick-geglu")
    counted, measured = one_more(model, *LAYERS, monkeypatch)
    assert counted + 2 * 128 * 640 * 2 == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("model", [LLAMA, GPT2, f"{LLAMA} {TP2}"], ids=["Llama", "GPT-2", "TP2"])
def test_local_attention_keeps_its_scores(model, monkeypatch):
    counted, measured = one_more(model, *LAYERS, monkeypatch, attention="local")
    assert counted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4 --recipe-set bf16_blocks=none"])
@pytest.mark.parametrize("block", ["M", "*", "-"])
def test_a_block_of_a_hybrid_keeps_what_it_saves(block, recipe, monkeypatch):
    patterns = "--hybrid-layer-pattern=*", f"--hybrid-layer-pattern=*{block}"
    counted, measured = one_more(f"{HYBRID} --precision-recipe {recipe}", *patterns, monkeypatch)
    assert counted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("recipe", ["fp8-tile", "mxfp8", "qat-nvfp4", "qat-mxfp8"])
def test_cached_weights_are_there_twice_where_gemms_take_codes(recipe, monkeypatch):
    """Codes of fprop and of dgrad, which in quantization-aware training are the same."""
    args = parse(f"{LLAMA} --num-layers 1 --precision-recipe {recipe}")
    (parts,) = stages(args, load_recipe(recipe))
    counted = sum(quantized_weight_bytes(x, False)[0] for part in parts for x in part.linears)
    measured = saved_bytes(args, VOCABULARY, monkeypatch).weights
    assert counted == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize(
    "contender", ["fp8-tile", "fp8-delayed", "mxfp8", "mxfp4-backward", "nvfp4"]
)
def test_a_linear_layer_keeps_what_an_h200_had_allocated(contender):
    row = next(r for r in json.loads(LINEAR.read_text())["rows"] if r["contender"] == contender)
    layer = Layer("decoder.layers.16.mlp.linear_fc1", 16, 32)
    precision = load_recipe(contender).precision_for(layer)
    _, inputs, outputs = row["size"]
    input_format = precision.quantizer("wgrad", "input").format
    assert input_format.bits_per_element / 8 == pytest.approx(
        row["kept_bytes_per_input_element"], rel=0.02
    )
    linear = Linear(inputs, outputs, precision)
    step, each = quantized_weight_bytes(linear, contender in ("nvfp4", "mxfp8"))
    # There no cache keeps fprop's copy: of two only dgrad's stays.
    copies = 2 if contender in ("fp8-tile", "fp8-delayed", "mxfp8") else 1
    measured = row["kept_bytes_per_weight_element"] * inputs * outputs
    assert step / copies + each == pytest.approx(measured, rel=0.02)


def test_a_llama_layer_in_bf16_counted_by_hand():
    args = parse(f"{LLAMA} --num-layers 1")
    args.transformer_impl = "transformer_engine"
    (parts,) = stages(args, load_recipe("bf16"))
    kept = sum((activation_bytes(args, part) for part in parts), Amounts())
    token = {
        "norms": 2 * (256 * 2 + 4),
        "linear inputs": (256 + 256 + 640) * 2,  # of qkv, fc1 and fc2; proj's is attention's
        "attention": (256 + 64 + 64 + 256) * 2 + 8 * 4,  # q, k, v, output; sums of 8 heads
        "activation": 2 * 640 * 2,
    }
    assert kept == {name: 256 * size for name, size in token.items()}
