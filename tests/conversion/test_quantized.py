"""Quantized exports: the bits of training in each reader's layout, and read back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_live import E2M1, by_groups, by_tiles, nibbles
from tiny_models import ROPE, check_alike, config_of, layer_tensor, make_model, weights
from training_runs import change_args

from megatron_lowbit import conversion
from megatron_lowbit.checkpoints.reader import CheckpointReader, TensorSlice
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.layouts import LAYOUTS
from megatron_lowbit.conversion.layouts.by_module import reciprocal
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import quantize
from tests.marks import others_slow

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
}  # fmt: skip
TILES = "fp8-128x128-e4m3"


def experts_only(folder: Path) -> str:
    """Write a recipe of MXFP4 in routed experts, and return its path."""
    (folder / "experts.yaml").write_text("""
name: experts
description: MXFP4 in the experts only
configs: {low: {weight: {format: mxfp4-2d, scale_rounding: rceil}, input: {format: mxfp4}}}
matchers: {experts: {type: glob, pattern: "*.experts.*", config: low, enabled: true}}
""")
    return str(folder / "experts.yaml")


def checkpoint(folder: Path, name: str, **changes) -> Path:
    """Return the files of a transformers model, and the model."""
    torch.manual_seed(0)
    changes = SIZES | changes if name in ("llama", "mixtral") else changes
    make_model(name, **changes).save_pretrained(folder / "source")
    to_megatron(folder / "source", folder / "checkpoint")
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("mixtral"), "mixtral", num_local_experts=3)


def export(source: Path, output: Path, layout: str, *recipes: str, changes=(), **options):
    """Return its tensors, config.json and report."""
    to_hugging_face(source, output, quantized=QuantizedAs(layout, recipes, changes), **options)
    report = json.loads((output / "quantization_report.json").read_text())
    return weights(output), config_of(output), report


def trained(source: Path, layer: int, format: str, **options) -> dict[str, torch.Tensor]:
    """Return a Llama layer's weights as its GEMMs see them: Megatron's tensors quantized whole."""
    names = {"self_attention.linear_qkv": ("q", "k", "v"), "self_attention.linear_proj": ("o",),
             "mlp.linear_fc1": ("gate", "up"), "mlp.linear_fc2": ("down",)}  # fmt: skip
    heights = {"q": 256, "k": 128, "v": 128, "o": 128, "gate": 256, "up": 256, "down": 128}
    exported = {}
    for key, parts in names.items():
        stacked = layer_tensor(source, key, (layer,), (3,))
        values = quantize(stacked, format, **options).dequantize()
        block = "self_attn" if key.startswith("self") else "mlp"
        # One group of queries: its heads, then its key, then its value.
        for part, rows in zip(parts, values.split([heights[p] for p in parts]), strict=True):
            exported[f"model.layers.{layer}.{block}.{part}_proj.weight"] = rows
    return exported


READ = {
    "nvfp4": ("nvfp4-2d", {}, [1]),
    "mxfp4": ("mxfp4-2d", {"scale_rounding": "rceil"}, [1]),
    "mxfp8": ("mxfp8-e4m3", {"scale_rounding": "rceil"}, [0, 1, 2]),
}
"""Recipes: the weight's format, its options and the layers that are not BF16."""


@pytest.mark.parametrize("recipe", READ)
def test_compressed_tensors_in_its_reader(llama, tmp_path, recipe):
    """transformers and compressed-tensors load training's weights, rounded to BF16."""
    from transformers import CompressedTensorsConfig, LlamaForCausalLM

    format, options, layers = READ[recipe]
    _, config, report = export(llama, tmp_path / "out", "compressed-tensors", recipe)
    loaded = LlamaForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=CompressedTensorsConfig(dequantize=True),
        dtype=torch.float32,
    ).state_dict()
    source = weights(llama.parent / "source")
    expected = {}
    for layer in layers:
        expected |= trained(llama, layer, format, **options)
    assert report["weights"].keys() == expected.keys()
    for name, tensor in source.items():
        if name in expected:
            tensor = expected[name].bfloat16().float()
            noise = (source[name] - expected[name]).square().sum()
            sqnr = 10 * torch.log10(source[name].square().sum() / noise)
            assert report["weights"][name]["sqnr_db"] == pytest.approx(float(sqnr), abs=1e-3)
        assert torch.equal(loaded[name], tensor), name
    kept = [name for name in config["quantization_config"]["ignore"] if "layers" in name]
    assert len(kept) == 7 * (3 - len(layers))


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [("compressed-tensors", "qat-int4-g32"), ("modelopt", "qat-nvfp4"),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("compressed-tensors", "nvfp4"), ("fp8-blocks", "fp8-tile")))],
)  # fmt: skip
def test_pieces_of_a_weight_have_the_bits_of_the_whole(
    llama, tmp_path, layout, recipe, monkeypatch
):
    *_, report = export(llama, tmp_path / "whole", layout, recipe)
    monkeypatch.setattr(conversion.layouts.layout, "_PIECE", 1)
    *_, report_of_pieces = export(llama, tmp_path / "pieces", layout, recipe)
    check_alike(tmp_path / "pieces", tmp_path / "whole")
    for name, weight in report["weights"].items():
        assert report_of_pieces["weights"][name]["sqnr_db"] == pytest.approx(weight["sqnr_db"])


def test_several_formats_in_one_folder(llama, tmp_path):
    """Groups by name, and the same tensors as each would have alone."""
    from transformers import LlamaForCausalLM

    file = tmp_path / "two.yaml"
    file.write_text("""
name: two
description: NVFP4 and MXFP8
configs:
  small: {weight: {format: nvfp4}, input: {format: nvfp4}}
  large: {weight: {format: mxfp8-e4m3}, input: {format: mxfp8-e4m3}}
matchers:
  mlp: {type: glob, pattern: "*.mlp.*", config: small, enabled: true}
  rest: {type: glob, pattern: "*", config: large, enabled: true}
""")
    exported, config, _ = export(llama, tmp_path / "out", "compressed-tensors", str(file))
    assert config["quantization_config"]["format"] == "mixed-precision"
    assert exported["model.layers.0.mlp.up_proj.weight_packed"].shape == (256, 64)
    assert exported["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    model(torch.arange(4)[None])  # here compressed-tensors decompresses
    for layer in range(3):
        for format in ("nvfp4", "mxfp8-e4m3"):
            for name, exact in trained(llama, layer, format).items():
                if (".mlp." in name) == (format == "nvfp4"):
                    assert torch.equal(model.get_parameter(name).float(), exact.bfloat16().float())


@pytest.mark.parametrize("recipe", ["fp8-tile", "fp8-tile-e4m3"])
def test_fp8_blocks(llama, tmp_path, recipe):
    """Codes times weight_scale_inv, a scale a 128x128 block."""
    changes = ["bf16_blocks=none"] if recipe == "fp8-tile-e4m3" else []
    out = tmp_path / "out"
    exported, config, report = export(llama, out, "fp8-blocks", recipe, changes=changes)
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    scale_format = "pow2" if recipe == "fp8-tile" else "fp32"
    with_scales = [name for name in exported if name.endswith("_scale_inv")]
    assert len(with_scales) == len(report["weights"]) == 21
    for layer in range(3):
        for name, exact in trained(llama, layer, TILES, scale_format=scale_format).items():
            codes, scales = exported[name], exported[f"{name}_scale_inv"]
            assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert torch.equal(by_tiles(codes, scales), exact)


@pytest.mark.parametrize("name", others_slow(["qwen3-moe", "deepseek-v3"], ["qwen3-moe"]))
def test_fp8_blocks_of_experts(name, tmp_path):
    """Codes and scales of training's weights, of experts, shared experts and projections alike."""
    changes = {"head_dim": 128} if name == "qwen3-moe" else {}
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
    source = checkpoint(tmp_path, name, **sizes, **changes)
    exported, _, _ = export(source, tmp_path / "out", "fp8-blocks", "fp8-tile")
    exact = weights(tmp_path / "source")
    others = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")
    matrices = {n for n, part in exact.items() if part.ndim == 2 and not n.endswith(others)}
    assert {n for n in exported if f"{n}_scale_inv" in exported} == matrices
    # A weight of one part, so quantized as it is, in either kind of MLP.
    for part in ("layers.1.self_attn.o_proj", "layers.3.mlp.experts.2.down_proj"):
        weight = quantize(exact[f"model.{part}.weight"], TILES, scale_format="pow2").dequantize()
        codes, scales = (exported[f"model.{part}.weight{end}"] for end in ("", "_scale_inv"))
        assert torch.equal(by_tiles(codes, scales), weight)
    to_megatron(tmp_path / "out", tmp_path / "again")
    again, _, _ = export(tmp_path / "again", tmp_path / "once more", "fp8-blocks", "fp8-tile")
    for n in matrices:
        assert torch.equal(again[n].view(torch.uint8), exported[n].view(torch.uint8)), n


def test_gpt_oss_layout_of_routed_experts(tmp_path):
    """The recipe names only routed experts: shared ones and dense layers stay as they are."""
    source = checkpoint(tmp_path, "deepseek-v3", hidden_size=64, moe_intermediate_size=64)
    exported, _, _ = export(source, tmp_path / "out", "gpt-oss", experts_only(tmp_path))
    assert exported["model.layers.1.mlp.experts.gate_up_proj_blocks"].shape == (8, 128, 2, 16)
    assert "model.layers.0.mlp.gate_proj.weight" in exported
    assert exported["model.layers.1.mlp.shared_experts.up_proj.weight"].dtype == torch.float32
    to_megatron(tmp_path / "out", tmp_path / "again")
    exact = weights(tmp_path / "source")["model.layers.2.mlp.experts.5.down_proj.weight"]
    seen = layer_tensor(tmp_path / "again", "2.mlp.experts.experts.linear_fc2", (5,), (8,))
    expected = quantize(exact, "mxfp4-2d", scale_rounding="rceil").dequantize()
    assert torch.equal(seen, expected.bfloat16())


def test_ragged_fp8_tiles(tmp_path):
    """A last tile of 64 rows or columns keeps its scale; import cuts it off again."""
    source = checkpoint(tmp_path, "llama", hidden_size=192)
    exported, _, _ = export(source, tmp_path / "out", "fp8-blocks", "fp8-tile")
    name = "model.layers.2.self_attn.o_proj.weight"
    assert (exported[name].shape, exported[f"{name}_scale_inv"].shape) == ((192, 256), (2, 2))
    assert exported["model.layers.2.mlp.up_proj.weight_scale_inv"].shape == (2, 2)
    to_megatron(tmp_path / "out", tmp_path / "there")
    for key in ("self_attention.linear_proj", "mlp.linear_fc1"):
        exact, seen = (layer_tensor(path, key, (2,), (3,)) for path in (source, tmp_path / "there"))
        exact = quantize(exact, TILES, scale_format="pow2").dequantize()
        assert torch.equal(seen, exact.bfloat16())


def test_modelopt(llama, tmp_path):
    """By ModelOpt's own description: low nibble first, value x weight_scale x weight_scale_2."""
    exported, config, _ = export(llama, tmp_path / "out", "modelopt", "nvfp4")
    document = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert document["quantization"]["quant_algo"] == "W4A16_NVFP4"
    assert document["quantization"]["exclude_modules"] == config["quantization_config"]["ignore"]
    for name, exact in trained(llama, 1, "nvfp4-2d").items():
        in_blocks = by_groups(E2M1[nibbles(exported[name])], exported[f"{name}_scale"].float())
        assert torch.equal(in_blocks * exported[f"{name}_scale_2"], exact)
    scales = {float(exported[f"model.layers.1.self_attn.{p}_proj.weight_scale_2"]) for p in "qkv"}
    assert len(scales) == 1


def test_modelopt_with_calibrated_activations(llama, tmp_path):
    """As in older exports, in a file of its own; scales of activations are not read."""
    source = tmp_path / "out"
    exported, config, _ = export(llama, source, "modelopt", "nvfp4")
    to_megatron(source, tmp_path / "plain")
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    document = json.loads((source / "hf_quant_config.json").read_text())
    document["quantization"]["quant_algo"] = "NVFP4"
    (source / "hf_quant_config.json").write_text(json.dumps(document))
    scales = {name.replace("weight_scale_2", "input_scale"): torch.ones(()) for name in exported
              if name.endswith("weight_scale_2")}  # fmt: skip
    save_file(exported | scales, source / "model.safetensors")
    to_megatron(source, tmp_path / "there")
    assert len(scales) == 7
    for key in ("self_attention.linear_qkv", "mlp.linear_fc2"):
        plain, there = (layer_tensor(tmp_path / p, key, (1,), (3,)) for p in ("plain", "there"))
        assert torch.equal(plain, there)


def test_gpt_oss(mixtral, tmp_path):
    """Only experts; transformers' function for gpt-oss reads them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    exported, config, _ = export(mixtral, tmp_path / "out", "gpt-oss", experts_only(tmp_path))
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    for name, rows in (("gate_up_proj", 512), ("down_proj", 128)):
        prefix = f"model.layers.1.mlp.experts.{name}"
        blocks, scales = (exported[f"{prefix}_{part}"] for part in ("blocks", "scales"))
        seen = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        for expert in range(3):
            key = "linear_fc1" if name == "gate_up_proj" else "linear_fc2"
            exact = layer_tensor(mixtral, f"mlp.experts.experts.{key}", (1, expert), (3, 3))
            q = quantize(exact, "mxfp4-2d", scale_rounding="rceil").dequantize()
            if name == "gate_up_proj":
                q = torch.stack(q.chunk(2), dim=1).flatten(0, 1)
            assert q.shape[0] == rows and torch.equal(seen[expert], q)
    assert exported["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("layout", "recipe", "model"),
    [
        ("fp8-blocks", "fp8-tile", "llama"), ("modelopt", "nvfp4", "llama"),
        ("compressed-tensors", "nvfp4", "mixtral"), ("compressed-tensors", "mxfp4", "mixtral"),
        ("compressed-tensors", "mxfp8", "llama"), ("gpt-oss", "experts", "mixtral"),
    ],
)  # fmt: skip
def test_there_and_back(request, tmp_path, layout, recipe, model):
    """The imported model is BF16; quantizing it again with power-of-two scales keeps it."""
    recipe = experts_only(tmp_path) if recipe == "experts" else recipe
    source = request.getfixturevalue(model)
    _, config, report = export(source, tmp_path / "out", layout, recipe, shard_bytes=200_000)
    to_megatron(tmp_path / "out", tmp_path / "there")
    assert "quantization_config" not in (tmp_path / "there/hugging_face/config.json").read_text()
    part = ("mlp.linear_fc2", (1,), (3,))
    if model == "mixtral":
        part = ("mlp.experts.experts.linear_fc2", (1, 0), (3, 3))
    seen, exact = (layer_tensor(path, *part) for path in (tmp_path / "there", source))
    assert seen.dtype == torch.bfloat16
    noise = (seen.float() - exact).square().sum()
    sqnr = float(10 * torch.log10(exact.square().sum() / noise))
    assert sqnr == pytest.approx(report["sqnr_db"], abs=0.3)
    if recipe != "nvfp4":
        _, again, _ = export(tmp_path / "there", tmp_path / "again", layout, recipe)
        assert again["quantization_config"] == config["quantization_config"]
        to_megatron(tmp_path / "again", tmp_path / "once more")
        tensors, held = (CheckpointReader(tmp_path / name / "iter_0000000")
                         for name in ("there", "once more"))  # fmt: skip
        for key in held.model:
            assert torch.equal(held.read(TensorSlice(key)), tensors.read(TensorSlice(key))), key


def test_training_s_own_recipe(llama, tmp_path):
    """Its arguments say which, with what was set on the command line."""
    copied = tmp_path / "checkpoint"
    to_megatron(llama.parent / "source", copied)
    recipe = {"precision_recipe": ["nvfp4"], "recipe_set": ["bf16_blocks=none"]}
    change_args(copied / "iter_0000000", **recipe)
    _, _, report = export(copied, tmp_path / "out", "modelopt", dtype="bfloat16")
    assert (report["recipe"], len(report["weights"])) == ("nvfp4", 21)
    assert weights(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16


REFUSED = {
    "no recipe": ("modelopt", [], "name one by --recipe"),
    "another format": (
        "modelopt",
        ["mxfp4"],
        "holds nvfp4, nvfp4-2d, but the recipe has.*mxfp4-2d",
    ),
    "nothing to do": ("modelopt", ["mxfp4-backward"], "quantizes no weight in fprop"),
    "not experts": ("gpt-oss", ["mxfp4"], "experts alone, but .* model.layers.1.self_attn.q_proj"),
    "random": ("compressed-tensors", ["nvfp4", "weight.rounding=stochastic"], "stochastically"),
    "scaled": ("compressed-tensors", ["mxfp4", "weight.three_quarters=true"], "three quarters"),
    "other tiles": (
        "fp8-blocks",
        ["fp8-tile", "weight.block=64"],
        "holds blocks of 128, .* fp8-128x128-e4m3 pow2 block 64: its block must be 128",
    ),
    "other blocks": ("compressed-tensors", ["mxfp8", "weight.block=16"], "its block must be 32"),
    "transformed": ("compressed-tensors", ["nvfp4", "fprop.hadamard={size: 16}"], "Hadamard"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_a_layout_cannot_hold_are_refused(llama, tmp_path, case):
    layout, (*names,), message = REFUSED[case]
    wanted = QuantizedAs(layout, names[:1], names[1:])
    with pytest.raises(UserError, match=message):
        to_hugging_face(llama, tmp_path / "out", quantized=wanted)
    assert not list(tmp_path.iterdir())


def test_tiles_across_heads_are_refused(tmp_path):
    """With two groups and heads of 32 a tile of 128 rows holds queries, a key and a value."""
    source = checkpoint(
        tmp_path, "llama", head_dim=32, num_attention_heads=4, num_key_value_heads=2
    )
    with pytest.raises(UserError, match=r"linear_qkv: tiles of 128 rows lie across the borders"):
        export(source, tmp_path / "out", "fp8-blocks", "fp8-tile")
    export(source, tmp_path / "out", "modelopt", "nvfp4")  # in rows of 16 nothing is lost


def test_unknown_quantization_is_refused(llama, tmp_path):
    """Each in one line, and nothing is left."""
    source = tmp_path / "out"
    exported, config, _ = export(llama, source, "compressed-tensors", "nvfp4")
    quantization = config["quantization_config"]
    name = "model.layers.1.mlp.up_proj.weight_packed"
    for changed, tensors, message in (
        ({"quant_method": "gptq"}, {}, "quant_method 'gptq' is not one of fp8, compressed-tensors"),
        ({"config_groups": {"a": {"format": "float-quantized"}}}, {}, "format float-quantized is"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, {}, "quant_algo 'FP8' is not one of"),
        ({"quant_method": "fp8"}, {}, "weight_block_size None"),
        ({"transform_config": {"a": 1}}, {}, "transform_config"),
        ({}, {name: exported[name].view(torch.int8)}, "int8; these codes are torch.uint8"),
        ({}, {name: exported[name][:, :32].contiguous()}, "its scales do not fit together"),
        ({}, {"model.layers.1.mlp.up_proj.weight_zero_point": torch.zeros(1)}, "has no place"),
    ):
        document = config | {"quantization_config": quantization | changed}
        (source / "config.json").write_text(json.dumps(document))
        save_file(exported | tensors, source / "model.safetensors")
        with pytest.raises(UserError, match=message):
            to_megatron(source, tmp_path / "there")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_every_layout_can_be_chosen():
    assert tuple(LAYOUTS) == conversion.LAYOUTS


def test_reciprocals_of_reciprocals():
    """A divisor is found for every tensor scale that training can make."""
    amax = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 10 + 1e-3
    scale = 1.0 / (2688.0 / amax)
    assert torch.equal(1.0 / reciprocal(scale), scale)
