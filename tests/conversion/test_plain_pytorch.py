"""From ``convert(model, "qat-...")`` to an export: the bits that training multiplied."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import MODELS, ROPE, make_model
from training_runs import record_weights

from megatron_lowbit import LowbitLinear, convert
from megatron_lowbit.conversion.command import main
from megatron_lowbit.conversion.families import FAMILIES
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.pytorch import linear
from megatron_lowbit.pytorch.convert import ONE_MATRIX
from tests.marks import others_slow

TOKENS = torch.arange(3, 19)[None]
RECIPES = ("qat-nvfp4", "qat-mxfp4", "qat-int4-g32")


@pytest.fixture
def llama():
    """A Llama whose queries, keys, gate and up have amaxes of their own."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    changes = {"num_hidden_layers": 2, "initializer_range": 0.1, "rope_parameters": ROPE}
    model = make_model("llama", **sizes, **changes)
    for name, parameter in model.named_parameters():
        if "k_proj" in name or "gate_proj" in name:
            parameter.data *= 0.3
    return model


def train(model, steps: int, autocast: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def weights_of_next_step(model, autocast: bool, monkeypatch) -> dict[str, object]:
    """Return the quantized weight of each module, as the next training step multiplies it."""
    weights, names = record_weights(monkeypatch), []
    for name, module in model.named_modules():
        if isinstance(module, LowbitLinear):
            module.register_forward_pre_hook(lambda *_, name=name: names.append(name))
    train(model, 1, autocast)
    return dict(zip(names, weights, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", others_slow(RECIPES, RECIPES[:1]))
def test_an_export_has_the_bits_of_a_converted_model(
    recipe, autocast, llama, tmp_path, monkeypatch
):
    """With autocast, of the model saved in BF16, which autocast quantizes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(linear, "select_engine", lambda device: ReferenceEngine("tests"))
    convert(llama, recipe, eval_precision="recipe").train()
    train(llama, 2, autocast)
    llama.save_pretrained("trained")
    if autocast:
        from transformers import AutoModelForCausalLM

        half = AutoModelForCausalLM.from_pretrained("trained", dtype=torch.bfloat16)
        half.save_pretrained("trained")
    with torch.no_grad():
        expected = llama.eval()(TOKENS).logits
    main(["to-megatron", "trained", "start"])
    main(["to-hugging-face", "start", "served", "--quantized", "compressed-tensors",
          "--recipe", recipe])  # fmt: skip
    tensors = load_file("served/model.safetensors")
    seen = weights_of_next_step(llama.train(), autocast, monkeypatch)
    assert len(seen) == 14
    for name, weight in seen.items():
        codes = tensors[f"{name}.weight_packed"].view(torch.uint8)
        scales = tensors[f"{name}.weight_scale"]
        assert torch.equal(codes, weight.codes.view(torch.uint8)), name
        assert torch.equal(scales.view(torch.uint8), weight.scales.view(torch.uint8)), name
        if recipe == "qat-nvfp4":
            divisor = tensors[f"{name}.weight_global_scale"]
            assert torch.equal(1.0 / divisor, weight.tensor_scale.view(1)), name
    if not autocast:
        from transformers import AutoModelForCausalLM

        served = AutoModelForCausalLM.from_pretrained("served", dtype=torch.bfloat16)
        with torch.no_grad():
            logits = served(TOKENS).logits.float()
        assert (logits - expected).norm() <= 2**-6 * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_every_family_s_joined_weights_share_a_scale_in_pytorch(name):
    """Names of Hugging Face's matrices that are one of Megatron-LM's."""
    with torch.device("meta"):
        model = make_model(name)
    config = json.loads(model.config.to_json_string())
    family = FAMILIES[type(model).__name__]
    for rule in family.from_config(config).rules:
        if len(rule.names) > 1 and "linear_" in rule.targets[0].key:
            ends = tuple(name.split(".")[-2] for name in rule.names)
            assert ends in ONE_MATRIX
            assert len({name.rsplit(".", 2)[0] for name in rule.names}) == 1
