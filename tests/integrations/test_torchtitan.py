"""Recipes in torchtitan's models, built and converted by torchtitan itself."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_lowbit import LowbitLinear, convert, load_recipe
from megatron_lowbit.errors import UserError

pytest.importorskip("torchtitan")

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torchtitan.models.deepseek_v3 import model_registry as deepseek
from torchtitan.models.llama3 import model_registry as llama
from torchtitan.models.utils import validate_converter_order

from megatron_lowbit.integrations.torchtitan import LowbitConverter, TitanLinear

ROOT = Path(__file__).parents[2]
NAMES = ("attention.qkv_linear.wqkv", "attention.wo", *(f"feed_forward.w{n}" for n in (1, 2, 3)))


def converted(recipe: str, *overrides: str):
    converter = LowbitConverter.Config(recipe=recipe, recipe_set=list(overrides))
    validate_converter_order([converter])
    return llama("debugmodel", converters=[converter]).model


def on_meta(config):
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    return model


def test_layers_of_the_recipe_are_converted():
    model = on_meta(converted("nvfp4", "bf16_blocks.first=1", "bf16_blocks.last=2"))
    lowbit = {name for name, module in model.named_modules() if isinstance(module, LowbitLinear)}
    assert lowbit == {f"layers.{block}.{name}" for block in (1, 2, 3) for name in NAMES}


def test_gate_and_up_share_a_tensor_scale_in_every_model_of_a_config():
    config = converted("nvfp4", "bf16_blocks=none")
    first, second = on_meta(config), on_meta(config)
    for model in (first, second):
        for block in model.layers.values():
            mlp = block.feed_forward
            assert mlp.w1.scaled_with == (mlp.w3,) and mlp.w3.scaled_with == (mlp.w1,)
            assert mlp.w2.scaled_with == block.attention.wo.scaled_with == ()


@pytest.mark.parametrize(
    ("recipe", "overrides"), [("nvfp4", ["bf16_blocks=none"]), ("fp8-tile", []), ("mxfp8", [])]
)
def test_outputs_and_gradients_are_a_converted_plain_models(recipe, overrides):
    torch.manual_seed(0)
    titan = converted(recipe, *overrides).layers[0].feed_forward.build()
    titan.init_states()
    plain = nn.ModuleDict({name: nn.Linear(layer.in_features, layer.out_features, bias=False)
                           for name, layer in titan.named_children()})  # fmt: skip
    plain.load_state_dict(titan.state_dict())
    convert(nn.ModuleList([plain]), load_recipe(recipe, overrides), blocks="")
    x = torch.randn(32, 256, requires_grad=True)
    results = []
    for mlp in (titan, plain):
        torch.manual_seed(1)
        w1, w2, w3 = mlp.get_submodule("w1"), mlp.get_submodule("w2"), mlp.get_submodule("w3")
        output = w2(F.silu(w1(x)) * w3(x))
        gradients = torch.autograd.grad(output.square().sum(), [x, *mlp.parameters()])
        results.append([output, *gradients])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_saved_configs_are_those_of_linear():
    linear = converted("fp8-tile").layers[0].attention.wo
    assert isinstance(linear, TitanLinear.Config)
    assert linear.to_dict().keys() == llama("debugmodel").model.lm_head.to_dict().keys()


def test_experts_are_refused():
    with pytest.raises(UserError, match="GroupedExperts"):
        deepseek("debugmodel", attn_backend="flex", moe_comm_backend="standard",
                 converters=[LowbitConverter.Config(recipe="fp8-tile")])  # fmt: skip


def test_tensor_parallelism_is_refused():
    layer = converted("fp8-tile").layers[0].attention.wo.build()

    class Parallel:
        tp_enabled = True

    with pytest.raises(UserError, match="tensor_parallel_degree"):
        layer.parallelize(Parallel())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("fp8-delayed", "delayed scaling"), ("nope", "nope"), ("nvfp4-late-bf16", "switches")],
)
def test_recipes_without_a_place_are_refused(recipe, message):
    with pytest.raises(UserError, match=message):
        LowbitConverter.Config(recipe=recipe).build()


@pytest.fixture
def assets(tmp_path) -> Path:
    """A tokenizer and text in one folder, made of this project's pages."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet
    )
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    pairs.train_from_iterator(pages, trainer)
    pairs.save(str(tmp_path / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    (tmp_path / "text").mkdir()
    lines = "\n".join(json.dumps({"text": page}) for page in pages)
    (tmp_path / "text" / "train.jsonl").write_text(lines)
    return tmp_path


def losses(assets: Path, module: str, config: str, steps: int) -> list[float]:
    """Return the losses of a run of torchtitan's trainer on a CPU."""
    script = Path(__file__).with_name("torchtitan_on_cpu.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
        script, "--module", module, "--config", config, "--hf_assets_path", assets,
        "--dataloader.dataset_path", assets / "text", "--dump_folder", assets / "out",
        "--training.steps", str(steps), "--training.local_batch_size", "1", "--training.seq_len",
        "256", "--training.disable_cuda_graphs", "--debug.seed", "1",
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples" / "torchtitan")])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    log = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    return [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([\d.]+)", log)]


@pytest.mark.slow
def test_the_trainer_of_torchtitan_trains_the_example(assets):
    bf16 = losses(assets, "llama3", "llama3_debugmodel", 2)
    nvfp4 = losses(assets, "lowbit_configs", "debug_nvfp4", 2)
    assert len(bf16) == len(nvfp4) == 2 and nvfp4 != bf16
    assert nvfp4 == pytest.approx(bf16, abs=0.02)
