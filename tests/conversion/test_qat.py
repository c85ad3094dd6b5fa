"""Quantization-aware training and its export: the bits of training's forward, and their readers."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import config_of, weights
from training_runs import record_weights, train

from megatron_lowbit.checkpoints.reader import CheckpointReader, TensorSlice
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.megatron_model import loaded_model
from megatron_lowbit.conversion.quantized import QuantizedAs, _changed_since, recipe_of
from megatron_lowbit.conversion.verify import verify
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import QuantizedTensor, quantize
from megatron_lowbit.recipes import load_recipe, shipped_recipes
from megatron_lowbit.recipes.record import record_of
from tests.marks import others_slow

# Query, key and value, and gate and up, in whole tiles of 128 rows.
MODEL = [
    "--num-layers", 2, "--hidden-size", 128, "--num-attention-heads", 2, "--kv-channels", 128,
    "--group-query-attention", "--num-query-groups", 1, "--ffn-hidden-size", 256, "--swiglu",
    "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope",
    "--untie-embeddings-and-output-weights", "--max-position-embeddings", 32, "--vocab-size", 500,
    "--hidden-dropout", 0, "--attention-dropout", 0,
]  # fmt: skip
PARTS = (("self_attn", ("q", "k", "v"), (256, 128, 128)), ("self_attn", ("o",), (128,)),
         ("mlp", ("gate", "up"), (256, 256)), ("mlp", ("down",), (128,)))  # fmt: skip
RECIPES = [name for name in shipped_recipes() if name.startswith("qat-")]
# In make test, three of the formats of weights; inputs leave the weights' bits.
QUICK = ("qat-nvfp4-activations", "qat-int4-g32", "qat-fp8-blocks")
EACH = others_slow(RECIPES, QUICK)
FC2 = "decoder.layers.mlp.linear_fc2.weight"
TOKENS = torch.arange(3, 19)[None]


class Run:
    """A run of four iterations: its checkpoint after three, and the weights of the fourth.

    Attributes:
        checkpoint: folder of the checkpoint after the third update.
        weights: weights of each layer as the fourth iteration's forward multiplied them.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            seen = record_weights(patch)
            # A larger step makes the model so uneven that rounding inputs to BF16 shows.
            train(*MODEL, "--train-iters", 4, "--lr", 1e-3, "--save", folder, "--save-interval", 3,
                  "--precision-recipe", recipe)  # fmt: skip
        self.checkpoint = folder / "iter_0000003"
        self.weights: list[QuantizedTensor] = seen[-2 * len(PARTS) :]  # a microbatch's


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    @cache
    def run(recipe: str) -> Run:
        return Run(tmp_path_factory.mktemp("run"), recipe)

    return run


def export(run: Run, output: Path, layout: str = "compressed-tensors"):
    """Return the tensors and config.json's quantization."""
    to_hugging_face(run.checkpoint, output, quantized=QuantizedAs(layout))
    return weights(output), config_of(output)["quantization_config"]


def layout_of(recipe: str) -> str:
    return "fp8-blocks" if "fp8-blocks" in recipe else "compressed-tensors"


def rows_of(run: Run):
    """Yield Hugging Face's name, the whole operand and the part's rows, of every weight."""
    for number, master in enumerate(run.weights):
        layer, (block, names, heights) = number // len(PARTS), PARTS[number % len(PARTS)]
        first = 0
        for name, height in zip(names, heights, strict=True):
            module = f"model.layers.{layer}.{block}.{name}_proj"
            yield module, master, slice(first, first + height)
            first += height


@pytest.mark.parametrize("recipe", EACH)
def test_an_export_has_the_bits_that_training_multiplied(recipe, run_of, tmp_path):
    """Codes, scales and tensor scale, against operands that the next iteration's forward made."""
    run = run_of(recipe)
    tensors, _ = export(run, tmp_path / "out", layout_of(recipe))
    count = 0
    for module, master, rows in rows_of(run):
        scales = tensors.get(f"{module}.weight_scale", tensors.get(f"{module}.weight_scale_inv"))
        codes = tensors.get(f"{module}.weight_packed", tensors.get(f"{module}.weight"))
        expected = master.scales[rows.start // 128 : rows.stop // 128]
        if master.format.block_rows == 1:
            expected = master.scales[rows]
        assert scales.dtype == expected.dtype and codes.is_contiguous()
        assert torch.equal(codes.view(torch.uint8), master.codes[rows].view(torch.uint8)), module
        assert torch.equal(scales.view(torch.uint8), expected.view(torch.uint8)), module
        if master.format.tensor_scaled:
            divisor = tensors[f"{module}.weight_global_scale"]
            assert torch.equal(1.0 / divisor, master.tensor_scale.view(1))
        count += 1
    assert count == 14


@pytest.mark.parametrize("recipe", EACH)
def test_training_multiplied_the_master_weight_quantized(recipe, run_of):
    """The other end of the chain: the checkpoint's weights, by ``quantize``, without history."""
    run = run_of(recipe)
    config = next(iter(load_recipe(recipe).configs.values()))
    weight_format = config.fprop.rhs.format
    tensors = CheckpointReader(run.checkpoint)
    stacked = tensors.read(TensorSlice(FC2))
    for layer in range(2):
        operand = run.weights[layer * len(PARTS) + 3]
        exact = quantize(stacked[layer], weight_format.name, **weight_format.options)
        if recipe == "qat-nvfp4-activations":
            # By the largest amax of the steps so far, in place of its own.
            assert operand.tensor_scale != exact.tensor_scale
            continue
        assert torch.equal(operand.codes.view(torch.uint8), exact.codes.view(torch.uint8))
        assert torch.equal(operand.dequantize(), exact.dequantize())


INPUTS = {
    "qat-nvfp4-activations": {"num_bits": 4, "strategy": "tensor_group", "dynamic": "local"},
    "qat-mxfp4-activations": {"num_bits": 4, "strategy": "group", "dynamic": True},
    "qat-mxfp8-activations": {"num_bits": 8, "strategy": "group", "dynamic": True},
    "qat-int4-g32-activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    "qat-int4-g128-activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
}


@pytest.mark.parametrize("recipe", [each for each in EACH if "fp8-blocks" not in each.values[0]])
def test_inputs_are_declared(recipe, run_of, tmp_path):
    """As in the presets of compressed-tensors; a recipe of only weights declares none."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    _, config = export(run_of(recipe), tmp_path / "out")
    (group,) = config["config_groups"].values()
    seen = group["input_activations"]
    if recipe not in INPUTS:
        assert seen is None
        return
    assert {key: seen[key] for key in INPUTS[recipe]} == INPUTS[recipe]
    preset = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "int4": "W4AFP8"}
    expected = preset_name_to_scheme(preset[recipe.split("-")[1]], ["Linear"])
    scheme = QuantizationScheme.model_validate(group)
    compared = {"num_bits", "type", "strategy", "symmetric", "dynamic", "scale_dtype"}
    for side in ("weights", "input_activations"):
        ours, theirs = (
            getattr(given, side).model_dump(include=compared) for given in (scheme, expected)
        )
        assert ours == theirs
    if "g32" not in recipe:
        assert scheme.weights.group_size == expected.weights.group_size


def test_an_nvfp4_input_has_the_scale_of_training_s_last_steps(run_of, tmp_path):
    """The largest amax of the history, in both layouts: 448 * 6 / amax, and amax / (448 * 6)."""
    run = run_of("qat-nvfp4-activations")
    tensors, _ = export(run, tmp_path / "out")
    others, config = export(run, tmp_path / "other", "modelopt")
    assert config["quant_algo"] == "NVFP4"
    reader = CheckpointReader(run.checkpoint)
    for layer in range(2):
        for path, modules in (
            ("self_attention.linear_qkv", ("self_attn.q", "self_attn.k", "self_attn.v")),
            ("mlp.linear_fc2", ("mlp.down",)),
        ):
            key = f"amax_history.decoder.layers.{layer}.{path}"
            amaxes = reader.read(TensorSlice(key))[0]
            assert (amaxes >= 0).sum() == 3  # one for each iteration
            for module in modules:
                name = f"model.layers.{layer}.{module}_proj"
                divisor, scale = (
                    tensors[f"{name}.input_global_scale"],
                    others[f"{name}.input_scale"],
                )
                torch.testing.assert_close(divisor, 2688 / amaxes.max()[None], rtol=1e-6, atol=0)
                assert torch.equal(1.0 / divisor[0], scale)


def test_without_a_history_no_nvfp4_input_is_declared(run_of, tmp_path):
    """A checkpoint of another recipe, such as one that is quantized after training."""
    run, out = run_of("qat-mxfp4"), tmp_path / "out"
    wanted = QuantizedAs("modelopt", ["qat-nvfp4-activations"])
    to_hugging_face(run.checkpoint, out, quantized=wanted)
    config = config_of(out)["quantization_config"]
    assert config["quant_algo"] == "W4A16_NVFP4"


def test_inputs_of_some_modules_alone_are_not_modelopt_s(run_of, tmp_path):
    wanted = QuantizedAs("modelopt", ["qat-nvfp4-activations"], [
        "configs.weights={weight: {format: nvfp4}}",
        "matchers.mlp={type: glob, pattern: '*.mlp.*', config: weights, enabled: true}",
    ])  # fmt: skip
    message = r"inputs of all modules or of none, .* the inputs of 8 of 14"
    with pytest.raises(UserError, match=message):
        to_hugging_face(
            run_of("qat-nvfp4-activations").checkpoint, tmp_path / "out", quantized=wanted
        )


def logits_of_training(run: Run, recipe: str) -> torch.Tensor:
    """Return the logits of Megatron-LM's model, in FP32 with the recipe in force."""
    arguments = [*map(str, MODEL), "--padded-vocab-size", "512", "--seq-length",
                 str(TOKENS.shape[1]), "--quantization-engine", "reference", "--ckpt-step", "3",
                 "--eval-precision", "recipe"]  # fmt: skip
    with (
        loaded_model(run.checkpoint.parent, arguments, load_recipe(recipe)) as model,
        torch.no_grad(),
    ):
        positions = torch.arange(TOKENS.shape[1])[None]
        return model(TOKENS, positions, attention_mask=None).float()[..., :500]


def logits_of_transformers(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.mark.parametrize("recipe", EACH)
def test_transformers_has_training_s_logits(recipe, run_of, tmp_path):
    """Logits agree but for BF16, 2**-8, in two blocks, and for inputs that it rounds otherwise.

    Inputs in BF16 take other codes here and there, a step of FP4 being up to a third of a number.
    Rounding that transformers omits, or does by other scales, would show: its logits are nearer
    to training's than the unquantized model's. On a CPU it quantizes no input of
    FP8 blocks, and has these weights in FP32.
    """
    run, is_blocks = run_of(recipe), "fp8-blocks" in recipe
    export(run, tmp_path / "out", layout_of(recipe))
    trained = "qat-fp8-blocks" if is_blocks else recipe
    theirs = logits_of_transformers(tmp_path / "out", None if is_blocks else torch.bfloat16)
    ours, plain = (logits_of_training(run, name) for name in (trained, "bf16"))
    difference = (theirs - ours).norm() / ours.norm()
    inputs = 2**-3 if "fp4" in recipe else 2**-4
    assert difference <= (2**-20 if is_blocks else inputs if recipe in INPUTS else 2**-6)
    assert difference <= 0.7 * (theirs - plain).norm() / ours.norm()


@pytest.mark.parametrize("recipe", ["qat-int4-g32", "qat-nvfp4-activations"])
def test_logits_are_verified(recipe, run_of, tmp_path):
    """By ``--verify``: both sides in FP32, weights by the recipe and its amaxes, inputs as is."""
    source, quantized = run_of(recipe).checkpoint.parent, QuantizedAs("compressed-tensors")
    to_hugging_face(source, tmp_path / "out", quantized=quantized)
    difference, largest = verify(tmp_path / "out", source, quantized=quantized)
    assert difference <= 1e-5 * largest


def test_a_late_start(tmp_path):
    """Two iterations in high precision, one of QAT: its amaxes are known, and its bits exported."""
    run = tmp_path / "run"
    switch = "switches.qat={iteration: 2, to: qat-nvfp4-activations}"
    train(*MODEL, "--train-iters", 3, "--save", run, "--precision-recipe", "bf16",
          "--recipe-set", switch)  # fmt: skip
    wanted = QuantizedAs("compressed-tensors", ["qat-nvfp4-activations"])
    to_hugging_face(run, tmp_path / "out", quantized=wanted)
    reader = CheckpointReader(run / "iter_0000003")
    key = "amax_history.decoder.layers.1.mlp.linear_fc2"
    amaxes = reader.read(TensorSlice(key))
    assert (amaxes[:2] >= 0).sum(1).tolist() == [1, 1]  # of input and weight
    stacked = reader.read(TensorSlice(FC2))
    format = load_recipe("qat-nvfp4").configs["nvfp4"].fprop.rhs
    expected = format(stacked[1], amaxes[1, -1])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(tensors[f"{name}.weight_packed"], expected.codes)
    seen = tensors[f"{name}.input_global_scale"][0]
    torch.testing.assert_close(seen, 2688 / amaxes[0, -1], rtol=1e-6, atol=0)
    with pytest.raises(UserError, match="quantizes no weight in fprop"):
        to_hugging_face(run, tmp_path / "no", quantized=QuantizedAs("compressed-tensors"))


@pytest.mark.parametrize(
    "recipe", ["qat-int4-g32", "qat-int4-g128-activations", "qat-nvfp4-activations"]
)
def test_an_export_is_read_back(recipe, run_of, tmp_path):
    """To Megatron-LM: the values that training multiplied, rounded to BF16."""
    run = run_of(recipe)
    export(run, tmp_path / "out")
    to_megatron(tmp_path / "out", tmp_path / "there")
    tensors = CheckpointReader(tmp_path / "there" / "iter_0000000")
    key = "decoder.layers.mlp.linear_fc1.weight"
    stacked = tensors.read(TensorSlice(key))
    for layer in range(2):
        values = run.weights[layer * len(PARTS) + 2].dequantize()
        assert torch.equal(stacked[layer], values.bfloat16())


def test_integers_of_other_widths_are_refused(run_of, tmp_path):
    out = tmp_path / "out"
    export(run_of("qat-int4-g32"), out)
    document = config_of(out)
    document["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    (out / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="pack-quantized weights of 8 bits are not read"):
        to_megatron(out, tmp_path / "there")


def test_groups_that_do_not_divide_a_row_are_refused(tmp_path):
    """A weight of 64 columns in groups of 128, of a model that was trained with another recipe."""
    from training_runs import MODEL as SMALLER

    train(*SMALLER, "--train-iters", 1, "--save", tmp_path / "run", "--precision-recipe", "bf16")
    wanted = QuantizedAs("compressed-tensors", ["qat-int4-g128"])
    with pytest.raises(UserError, match="64 columns are not whole blocks of 128"):
        to_hugging_face(tmp_path / "run", tmp_path / "out", quantized=wanted)


RECIPE = """
name: mine
formats: [mine.py]
configs: {}
matchers: {}
"""


def trained_with(recipe: str, *changes: str) -> SimpleNamespace:
    """Return the recipe that an export reads of a checkpoint without the text of one."""
    return SimpleNamespace(path=Path("runs"), recipes=[recipe], recipe_set=[*changes],
                           recipe_record=None)  # fmt: skip


def test_a_checkpoint_runs_no_format_file(tmp_path):
    """It may come from others, and its recipe and the recipe's file with it."""
    trace = tmp_path / "trace"
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(f"open({str(trace)!r}, 'w')")
    path = str(tmp_path / "mine.yaml")
    checkpoint = trained_with(path)
    with pytest.raises(UserError, match=r"mine\.py: not run; .* name it by --recipe"):
        recipe_of(QuantizedAs("modelopt"), checkpoint)
    assert not trace.exists()
    with pytest.raises(UserError, match="FORMATS must be"):
        recipe_of(QuantizedAs("modelopt", [path]), checkpoint)
    assert trace.exists()


def test_a_shipped_recipe_of_a_checkpoint():
    checkpoint = trained_with("nvfp4", "wgrad=null")
    assert recipe_of(QuantizedAs("modelopt"), checkpoint).name == "nvfp4"


def test_the_recipe_of_training_is_that_of_its_text(tmp_path):
    """The file may have been edited or deleted since; the export keeps training's formats."""
    file = tmp_path / "mine.yaml"
    text = (Path(__file__).parents[2] / "recipes" / "nvfp4.yaml").read_text()
    file.write_text(text)
    checkpoint = trained_with(str(file))
    checkpoint.recipe_record = record_of(checkpoint.recipes)
    assert _changed_since(checkpoint) is None
    edited = text.replace("nvfp4-2d", "mxfp4-2d").replace("format: nvfp4,", "format: mxfp4,")
    file.write_text(edited)
    assert recipe_of(QuantizedAs("modelopt"), checkpoint) == load_recipe("nvfp4")
    assert _changed_since(checkpoint) == (
        f"{file} has changed since training: now recipe nvfp4 with configs.nvfp4.input.format "
        "mxfp4 instead of nvfp4 (2 more fields differ); the export follows training; --recipe "
        f"{file} takes the recipe as it is now"
    )
    file.unlink()
    assert recipe_of(QuantizedAs("modelopt"), checkpoint) == load_recipe("nvfp4")
    assert _changed_since(checkpoint) == (
        f"recipe file {file} does not exist; the export follows the text in the checkpoint"
    )


def test_a_checkpoint_without_the_text_of_its_recipe():
    expected = "runs: records no text of its recipe; nvfp4 is taken as it is now"
    assert _changed_since(trained_with("nvfp4")) == expected
