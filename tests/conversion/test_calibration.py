"""``--calibrate``: tensor scales of inputs, against the inputs of transformers' model."""

from pathlib import Path

import pytest
import torch
from tiny_models import ROPE, config_of, make_model, weights
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_lowbit.conversion import calibration
from megatron_lowbit.conversion.command import main
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.errors import UserError

SIZES = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 16, "rope_parameters": ROPE, "initializer_range": 0.3,
}  # fmt: skip
LENGTH = SIZES["max_position_embeddings"]
DOCUMENTS = ("The first document of a few.", "And a second one, which is longer than it.")
RECIPE = "qat-nvfp4-activations"
TOP = 448 * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """``model`` with a tokenizer of bytes, ``start``, the same as a checkpoint, and ``text``."""
    return write(tmp_path_factory.mktemp("calibration"), "llama")


def write(folder: Path, name: str, **sizes: object) -> Path:
    torch.manual_seed(0)
    make_model(name, **SIZES, **sizes).save_pretrained(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "text").mkdir()
    for number, document in enumerate(DOCUMENTS):
        (folder / "text" / f"{number}.txt").write_text(document)
    to_megatron(folder / "model", folder / "start")
    return folder


def amaxes_in_transformers(folder: Path, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Return the amax of each linear module's input in FP32, sequence by sequence."""
    from transformers import LlamaForCausalLM

    model, amaxes = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), {}

    def watch(name: str, module: torch.nn.Module) -> None:
        def record(_, inputs):
            amaxes[name] = max(amaxes.get(name, 0), float(inputs[0].abs().max()))

        module.register_forward_pre_hook(record)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            watch(name, module)
    for sequence in torch.tensor(tokens).split(LENGTH):
        model(sequence[None])
    return amaxes


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("sequences", [2, 16])
def test_scales_are_those_of_transformers_inputs(folder, tmp_path, layout, sequences, monkeypatch):
    """With all tokens of the text, and with the tokens of two sequences."""
    monkeypatch.setattr(calibration, "SEQUENCES", sequences)
    wanted = QuantizedAs(layout, [RECIPE], (), folder / "text")
    to_hugging_face(folder / "start", tmp_path / "out", quantized=wanted)
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    tokens = [token for text in DOCUMENTS for token in [*tokenizer.encode(text).ids, end]]
    assert 4 * LENGTH < len(tokens) < 16 * LENGTH
    expected = amaxes_in_transformers(folder, tokens[: sequences * LENGTH])
    tensors = weights(tmp_path / "out")
    assert len(expected) == 7 * SIZES["num_hidden_layers"]
    for name, amax in expected.items():
        if layout == "modelopt":
            found = tensors[f"{name}.input_scale"] * TOP
        else:
            found = TOP / tensors[f"{name}.input_global_scale"]
        assert float(found) == pytest.approx(amax, rel=1e-5), name
    config = config_of(tmp_path / "out")["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["input_activations"]["num_bits"] == 4


def test_weights_are_those_without_calibration(folder, tmp_path):
    exported = []
    for text in (None, folder / "text"):
        wanted = QuantizedAs("compressed-tensors", [RECIPE], (), text)
        to_hugging_face(folder / "start", tmp_path / str(text is None), quantized=wanted)
        exported.append(weights(tmp_path / str(text is None)))
    plain, calibrated = exported
    assert {name for name in calibrated if name not in plain} == {
        name.replace("weight_global", "input_global") for name in plain if "weight_global" in name
    }
    for name, tensor in plain.items():
        bits = [x.contiguous().view(-1).view(torch.uint8) for x in (tensor, calibrated[name])]
        assert torch.equal(*bits), name


def test_each_expert_has_the_scale_of_its_tokens(tmp_path):
    write(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    wanted = QuantizedAs("compressed-tensors", [RECIPE], (), tmp_path / "text")
    to_hugging_face(tmp_path / "start", tmp_path / "out", quantized=wanted)
    tensors = weights(tmp_path / "out")
    names = [name for name in tensors if name.endswith("weight_global_scale")]
    assert len(names) == 2 * (4 + 4 * 3)
    scales = {name: tensors[name.replace("weight", "input")] for name in names}
    of_w1 = [
        float(scale) for name, scale in scales.items() if name.endswith("w1.weight_global_scale")
    ]
    assert len(set(of_w1)) > 2
    (tmp_path / "short").write_text("a")
    quantized = ("--quantized", "compressed-tensors", "--recipe", RECIPE)
    message = r"short: no token reaches decoder\.layers\.\d\.mlp\.experts\.local_experts\.\d\."
    refused(tmp_path, tmp_path / "other", message, *quantized, "--calibrate", tmp_path / "short")


def refused(folder: Path, output: Path, message: str, *arguments: object) -> None:
    words = ["to-hugging-face", folder / "start", output, *arguments]
    with pytest.raises(UserError, match=message):
        main([*map(str, words)])
    assert not output.exists()


def test_refusals(folder, tmp_path):
    text, out = folder / "text", tmp_path / "out"
    quantized = ("--quantized", "compressed-tensors", "--recipe")
    refused(folder, out, "--calibrate go with --quantized", "--calibrate", text)
    message = "recipe qat-mxfp4 quantizes no input with a tensor scale; omit it"
    refused(folder, out, message, *quantized, "qat-mxfp4", "--calibrate", text)
    (tmp_path / "empty.jsonl").write_text("")
    message = r"--calibrate .*empty.jsonl: holds no text"
    refused(folder, out, message, *quantized, RECIPE, "--calibrate", tmp_path / "empty.jsonl")
    (tmp_path / "no_tokenizer").mkdir()
    (tmp_path / "no_tokenizer" / "config.json").write_text(
        (folder / "model" / "config.json").read_text()
    )
    message = "there is no tokenizer.json in this folder"
    refused(folder, out, message, *quantized, RECIPE, "--calibrate", text, "--carry",
            tmp_path / "no_tokenizer")  # fmt: skip
