"""Weights of a model in memory for a serving engine: the bits of training's forward pass."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_qat import MODEL, Run, layout_of
from tiny_models import ROPE, config_of, make_model, weights
from torch import nn
from training_runs import record_weights

from megatron_lowbit import LowbitLinear, convert, load_recipe
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.live import quantization_config, quantized_weights
from megatron_lowbit.conversion.megatron_model import loaded_model
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.pytorch import linear

# isort: split
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.utils import get_model_config

from tests.marks import others_slow

RECIPES = ("qat-nvfp4", "qat-mxfp4", "qat-mxfp8", "qat-fp8-blocks", "qat-int4-g32")
TOKENS = torch.arange(3, 19)[None]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def llama(dtype: torch.dtype, **changes):
    """Return a Llama with weights in whole tiles and amaxes that differ."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}  # fmt: skip
    model = make_model("llama", **sizes, initializer_range=0.1, rope_parameters=ROPE, **changes)
    for name, parameter in model.named_parameters():
        if "k_proj" in name or "gate_proj" in name:
            parameter.data *= 0.3
    return model.to(dtype)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes (R, K) of bytes with the even column in the low half."""
    packed = packed.contiguous().view(torch.uint8).long()
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def by_groups(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (values.view(*scales.shape, -1) * scales[..., None]).flatten(1)


def by_tiles(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return codes (R, K) times the scales of their 128 x 128 tiles, the last of which are cut."""
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]]


def decoded(module: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a module's weight in FP32, as vLLM documents the layouts that it loads.

    NVFP4: E2M1 times the E4M3 scale of 16, divided by the global scale. MX: elements times two to
    the power of the scale's byte less 127. FP8 blocks: elements times the tile's inverse scale.
    INT4: the code less 8, times the group's scale.
    """
    if "weight_scale_inv" in module:
        return by_tiles(module["weight"], module["weight_scale_inv"])
    if "weight_packed" not in module:
        exponents = module["weight_scale"].view(torch.uint8).float() - 127
        return by_groups(module["weight"].float(), torch.exp2(exponents))
    codes = nibbles(module["weight_packed"])
    if "weight_shape" in module:
        return by_groups(codes.float() - 8, module["weight_scale"].float())
    if "weight_global_scale" not in module:
        exponents = module["weight_scale"].view(torch.uint8).float() - 127
        return by_groups(E2M1[codes], torch.exp2(exponents))
    in_blocks = by_groups(E2M1[codes], module["weight_scale"].float())
    return in_blocks * (1.0 / module["weight_global_scale"])


def modules_of(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        modules.setdefault(module, {})[end] = tensor
    return modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_serving_layer_computes_what_training_computed(recipe, dtype, monkeypatch):
    monkeypatch.setattr(linear, "select_engine", lambda device: ReferenceEngine("tests"))
    model = convert(llama(dtype), recipe)
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, LowbitLinear):
            module.register_forward_hook(
                lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)})
            )
    model(TOKENS)
    modules = modules_of(dict(quantized_weights(model, layout=layout_of(recipe))))
    assert len(seen) == 14
    for name, (x, output) in seen.items():
        weight = decoded(modules[name])
        assert not torch.equal(weight, model.get_parameter(f"{name}.weight").float())
        assert torch.equal(F.linear(x.float(), weight).to(dtype), output), name


@pytest.mark.parametrize(
    "recipe", ["nvfp4", "nvfp4 input.row_scaled=true", "mxfp4", "mxfp8", "fp8-tile"]
)
def test_weights_are_what_fprop_multiplies_where_it_quantizes_inputs_too(recipe, monkeypatch):
    monkeypatch.setattr(linear, "select_engine", lambda device: ReferenceEngine("tests"))
    recipe, *changes = recipe.split()
    changes += ["bf16_blocks=none"] if "bf16_blocks" in load_recipe(recipe).matchers else []
    model = convert(llama(torch.bfloat16), load_recipe(recipe, changes))
    operands, names = record_weights(monkeypatch), []
    for name, module in model.named_modules():
        if isinstance(module, LowbitLinear):
            module.register_forward_pre_hook(lambda *_, name=name: names.append(name))
    model(TOKENS)
    layout = "fp8-blocks" if recipe == "fp8-tile" else "compressed-tensors"
    modules = modules_of(dict(quantized_weights(model, layout=layout)))
    assert len(names) == len(operands) == 14
    for name, operand in zip(names, operands, strict=True):
        assert torch.equal(decoded(modules[name]), operand.dequantize()), name
    groups = quantization_config(model, layout=layout).get("config_groups", {})
    # Readers quantize inputs with these formats too; NVFP4's need a known tensor scale.
    assert all((group["input_activations"] is None) == (recipe == "nvfp4")
               for group in groups.values())  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_of_weights_decoded_to_bf16_differ_by_their_rounding(recipe, monkeypatch):
    """A serving engine may round decoded weights to BF16, as training in BF16 does not."""
    monkeypatch.setattr(linear, "select_engine", lambda device: ReferenceEngine("tests"))
    model = convert(llama(torch.bfloat16), recipe, eval_precision="recipe").eval()
    modules = modules_of(dict(quantized_weights(model, layout=layout_of(recipe))))
    served = llama(torch.bfloat16).eval()
    with torch.no_grad():
        for name, module in served.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(decoded(modules[name]))
        expected, plain = model(TOKENS).logits.float(), llama(torch.bfloat16)(TOKENS).logits
        moved = (served(TOKENS).logits.float() - expected).norm() / expected.norm()
        quantization = (plain.float() - expected).norm() / expected.norm()
    print(recipe, f"{moved:.5f} {quantization:.5f}")
    assert moved < 2**-6 and moved < quantization / 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_tensors_are_the_models(recipe):
    model = convert(llama(torch.bfloat16), recipe)
    tensors = {}
    for name, tensor in quantized_weights(model, layout=layout_of(recipe)):
        assert torch.is_grad_enabled() and not tensor.requires_grad
        tensors[name] = tensor
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(tensors[name], model.get_parameter(name))
    config = quantization_config(model, layout=layout_of(recipe))
    assert "lm_head" in config.get("ignore", config.get("modules_to_not_convert"))


@pytest.mark.parametrize("recipe", others_slow(RECIPES, RECIPES[::3]))
def test_a_megatron_model_gives_the_tensors_of_its_export(recipe, tmp_path):
    run = Run(tmp_path / "run", recipe)
    wanted = QuantizedAs(layout_of(recipe))
    to_hugging_face(run.checkpoint, tmp_path / "out", quantized=wanted)
    exported = weights(tmp_path / "out")
    arguments = [*map(str, MODEL), "--padded-vocab-size", "512", "--seq-length", "16",
                 "--quantization-engine", "reference", "--ckpt-step", "3"]  # fmt: skip
    parent = run.checkpoint.parent
    with loaded_model(parent, arguments, load_recipe(recipe)) as model:
        wrapped = DistributedDataParallel(
            get_model_config(model), DistributedDataParallelConfig(), model
        )
        live = dict(quantized_weights(wrapped, recipe, layout=wanted.layout))
        config = quantization_config(model, recipe, layout=wanted.layout)
    assert config == config_of(tmp_path / "out")["quantization_config"]
    assert live.keys() == exported.keys()
    for name, tensor in exported.items():
        assert live[name].dtype == tensor.dtype
        assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8)), name


LATENTS = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "intermediate_size": 64}
KEPT = """
name: kept
description: down projections of latents in BF16
configs: {low: {weight: {format: nvfp4}}, bf16: {}}
matchers:
  latents: {type: glob, pattern: "*_down_proj", config: bf16, enabled: true}
  rest: {type: glob, pattern: "*", config: low, enabled: true}
"""


@pytest.mark.parametrize(
    ("recipe", "named"), [("qat-nvfp4", True), ("qat-mxfp8", False), ("kept.yaml", False)]
)
def test_tensor_scales_that_engines_do_not_load(recipe, named, tmp_path, capsys, monkeypatch):
    """vLLM and SGLang load one tensor scale for both down projections of latent attention."""
    monkeypatch.chdir(tmp_path)
    Path("kept.yaml").write_text(KEPT)
    torch.manual_seed(0)
    model = make_model("youtu", **LATENTS)
    model.save_pretrained("source")
    to_megatron(Path("source"), Path("start"))
    capsys.readouterr()
    wanted = QuantizedAs("compressed-tensors", [recipe])
    to_hugging_face(Path("start"), Path("out"), quantized=wanted)
    first = "model.layers.0.self_attn.q_a_proj"
    message = f"vLLM and SGLang give {first}.weight and kv_a_proj_with_mqa.weight one tensor scale"
    assert (message in capsys.readouterr().out) == named
    modules = modules_of(weights(Path("out")))
    pair = (modules[name] for name in (first, first.replace("q_a_proj", "kv_a_proj_with_mqa")))
    divisors = [module.get("weight_global_scale") for module in pair]
    assert (None not in divisors and divisors[0] != divisors[1]) == named
    if named:
        with pytest.raises(UserError, match=f"quantized_weights: {message}"):
            dict(quantized_weights(convert(model, recipe)))


@pytest.mark.parametrize("replaces", [copy.deepcopy, lambda layer: nn.Linear(128, 128)])
def test_a_layer_that_was_replaced_leaves_no_tensor_scale(replaces):
    """Engines give queries, keys and values one tensor scale; formats without one have no such."""
    for recipe in ("qat-nvfp4", "qat-mxfp4"):
        model = convert(llama(torch.bfloat16), recipe)
        attention = model.model.layers[0].self_attn
        attention.k_proj = replaces(attention.k_proj).to(torch.bfloat16)
        if recipe == "qat-nvfp4":
            with pytest.raises(UserError, match=r"_proj: a layer .* was replaced"):
                dict(quantized_weights(model))
            convert(model, recipe)
        tensors = dict(quantized_weights(model))
        name = "model.layers.0.self_attn.{}_proj.weight_global_scale"
        scales = [tensors.get(name.format(part)) for part in "qkv"]
        assert scales == scales[:1] * 3


def test_what_is_not_exported_is_refused():
    with pytest.raises(UserError, match="no converted layer"):
        dict(quantized_weights(llama(torch.float32)))
    model = convert(llama(torch.float32), "qat-mxfp8")
    with pytest.raises(UserError, match="fp8-blocks holds"):
        dict(quantized_weights(model, layout="fp8-blocks"))
    with pytest.raises(UserError, match="layout='gguf' is not one of"):
        dict(quantized_weights(model, layout="gguf"))
    with pytest.raises(UserError, match="recipe: the layers"):
        dict(quantized_weights(model, "qat-mxfp8"))
    with pytest.raises(TypeError, match=r"model is an OrderedDict, not an nn\.Module"):
        dict(quantized_weights(model.state_dict()))
