"""``export``: a converted model's folder, as the way through Megatron-LM writes it."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from test_live import llama
from tiny_models import MODELS, check_alike, config_of, make_model, weights
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from megatron_lowbit import convert, export, load_recipe
from megatron_lowbit.conversion.command import main
from megatron_lowbit.conversion.quantized_folder import QUANTIZATION
from megatron_lowbit.errors import UserError
from tests.marks import others_slow

LAYOUTS = {
    "qat-nvfp4": "compressed-tensors", "nvfp4": "modelopt", "qat-mxfp8": "compressed-tensors",
    "qat-fp8-blocks": "fp8-blocks", "qat-int4-g32": "compressed-tensors",
}  # fmt: skip


@pytest.mark.parametrize("recipe", others_slow(LAYOUTS, ["qat-nvfp4"]))
def test_equals_an_export_by_way_of_megatron_lm(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = ["bf16_blocks=none"] if recipe == "nvfp4" else []
    check_against_megatron_lm(llama(torch.bfloat16), recipe, changes)
    assert {file.name for file in Path("direct").iterdir()} >= {"generation_config.json"}


@pytest.mark.parametrize("name", others_slow(["nemotron-h", "bamba"], ["nemotron-h"]))
def test_hybrids_equal_an_export_by_way_of_megatron_lm(name, tmp_path, monkeypatch):
    """Convolutions stay in high precision, and transformers renames modules where it loads them."""
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    heads = {"nemotron-h": "mamba_num_heads", "bamba": "mamba_n_heads"}[name]
    model = make_model(name, **sizes, **{heads: 16}).bfloat16()
    check_against_megatron_lm(model, "qat-mxfp8", [])


def check_against_megatron_lm(model, recipe: str, changes: list[str]) -> None:
    """Export a model both ways in the current folder, and compare all bits."""
    layout = LAYOUTS[recipe]
    model.save_pretrained("plain")
    main(["to-megatron", "plain", "start"])
    words = ["--recipe", recipe, *[word for change in changes for word in ("--recipe-set", change)]]
    main(["to-hugging-face", "start", "served", "--quantized", layout, *words])
    export(convert(model, load_recipe(recipe, changes)), "direct", layout)
    check_alike(Path("direct"), Path("served"))
    direct, served = (config_of(Path(name))[QUANTIZATION] for name in ("direct", "served"))
    for config in (direct, served):
        ignored = "ignore" if "ignore" in config else "modules_to_not_convert"
        config[ignored] = sorted(config[ignored])
    assert direct == served


CONVERTED = [name for name in MODELS if name not in ("gpt-2", "mamba-2")]  # without an nn.Linear


@pytest.mark.parametrize("name", others_slow(CONVERTED, ["mixtral", "nemotron-h", "tied llama"]))
def test_names_and_configuration_are_those_that_transformers_saves(name, tmp_path):
    """In memory, transformers 5 stacks experts and has other names."""
    model = make_model(name)
    model.save_pretrained(tmp_path / "plain")
    with warnings.catch_warnings(action="ignore"):  # experts stay in high precision
        convert(model, "qat-fp8-blocks")
    export(model, tmp_path / "served", "fp8-blocks")
    plain, served = weights(tmp_path / "plain"), weights(tmp_path / "served")
    scales = {key for key in served if key.endswith("_scale_inv")}
    assert served.keys() - scales == plain.keys()
    for key in plain.keys() - {key.removesuffix("_scale_inv") for key in scales}:
        assert torch.equal(served[key], plain[key]), key
    config = config_of(tmp_path / "served")
    assert config.pop(QUANTIZATION)
    assert config == config_of(tmp_path / "plain")


def compile_a_block(model):
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


def checkpoint_a_block(model):
    apply_activation_checkpointing(model, check_fn=lambda part: part is model.model.layers[1])
    return model


def compile_in_parallel(model):
    return torch.compile(DistributedDataParallel(model))


def to_gpu(model):
    return model.cuda()


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        compile_a_block,
        checkpoint_a_block,
        compile_in_parallel,
        pytest.param(to_gpu, marks=pytest.mark.gpu),
    ],
)
def test_wrappers_leave_the_names(wrap, tmp_path, process_group):
    model = convert(llama(torch.bfloat16), "qat-mxfp8")
    export(model, tmp_path / "plain")
    export(wrap(model), tmp_path / "wrapped")
    check_alike(tmp_path / "wrapped", tmp_path / "plain")
    assert config_of(tmp_path / "wrapped") == config_of(tmp_path / "plain")


def test_a_module_at_two_paths_and_tensors_without_axes(tmp_path):
    model = llama(torch.bfloat16)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.register_buffer("number", torch.tensor(3.0))
    export(convert(model, "qat-mxfp8"), tmp_path / "served")
    tensors = weights(tmp_path / "served")
    assert torch.equal(tensors["model.number"], torch.tensor(3.0))
    for end in ("weight", "weight_scale"):
        first, second = (tensors[f"model.layers.{n}.mlp.down_proj.{end}"] for n in range(2))
        assert first.element_size() == 1
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Adapter(nn.Module):
    """A layer within an adapter, as in PEFT."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer


def test_tied_embeddings_are_written_once_and_read_again(tmp_path):
    from transformers import AutoModelForCausalLM

    model = convert(llama(torch.bfloat16, tie_word_embeddings=True), "qat-mxfp8")
    export(model, tmp_path / "served")
    assert "lm_head.weight" not in weights(tmp_path / "served")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    assert torch.equal(read.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_an_interrupted_export_leaves_nothing(error, tmp_path, monkeypatch, capsys):
    """The weights change in training: nothing is continued."""
    model = convert(llama(torch.bfloat16), "qat-mxfp8")
    export(model, tmp_path / "served")
    before = weights(tmp_path / "served")

    def fail(folder):
        raise error

    monkeypatch.setattr(model.generation_config, "save_pretrained", fail)
    with pytest.raises((UserError, KeyboardInterrupt)) as raised:
        export(model, tmp_path / "served", force=True)
    assert "same command" not in f"{raised.value}{capsys.readouterr()}"
    assert [path.name for path in tmp_path.iterdir()] == ["served"]
    assert weights(tmp_path / "served").keys() == before.keys()


def test_refusals_leave_nothing(tmp_path):
    model = llama(torch.bfloat16)
    with pytest.raises(UserError, match="no converted layer quantizes a weight"):
        export(model, tmp_path / "served")
    convert(model, "qat-mxfp8")
    with pytest.raises(UserError, match="layout='gguf' is not one of fp8-blocks"):
        export(model, tmp_path / "served", "gguf")
    with pytest.raises(UserError, match="Sequential has no config"):
        export(nn.Sequential(), tmp_path / "served")
    adapted = llama(torch.bfloat16)
    adapted.model.layers[0].mlp.up_proj = Adapter(adapted.model.layers[0].mlp.up_proj)
    with pytest.raises(UserError, match=r"up_proj\.base_layer has an adapter; merge it"):
        export(convert(adapted, "qat-mxfp8"), tmp_path / "served")
    pruned = convert(llama(torch.bfloat16), "qat-mxfp8")
    prune.identity(pruned.model.layers[1].mlp.up_proj, "weight")
    with pytest.raises(UserError, match=r"1\.mlp\.up_proj: its weight is saved as another tensor"):
        export(pruned, tmp_path / "served")
    with pytest.raises(UserError, match=r"'model.embed_tokens.weight'.* is no plain tensor"):
        export(copy.deepcopy(model).to("meta"), tmp_path / "served")
    assert not list(tmp_path.iterdir())
    export(model, tmp_path / "served")
    with pytest.raises(UserError, match="exists; force=True replaces it"):
        export(model, tmp_path / "served")
    export(model, tmp_path / "served", force=True)
