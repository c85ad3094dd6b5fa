"""``export``: a converted model's folder, as the way through Megatron-LM writes it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_live import llama
from torch import nn

from megatron_lowbit import convert, export, load_recipe
from megatron_lowbit.conversion.command import main
from megatron_lowbit.errors import UserError
from tests.marks import others_slow

LAYOUTS = {
    "qat-nvfp4": "compressed-tensors", "nvfp4": "modelopt", "qat-mxfp8": "compressed-tensors",
    "qat-fp8-blocks": "fp8-blocks", "qat-int4-g32": "compressed-tensors",
}  # fmt: skip


@pytest.mark.parametrize("recipe", others_slow(LAYOUTS, ["qat-nvfp4"]))
def test_equals_an_export_by_way_of_megatron_lm(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes, layout = (["bf16_blocks=none"] if recipe == "nvfp4" else []), LAYOUTS[recipe]
    model = llama(torch.bfloat16)
    model.save_pretrained("plain")
    main(["to-megatron", "plain", "start"])
    words = ["--recipe", recipe, *[word for change in changes for word in ("--recipe-set", change)]]
    main(["to-hugging-face", "start", "served", "--quantized", layout, *words])
    export(convert(model, load_recipe(recipe, changes)), "direct", layout)
    direct, served = (load_file(f"{name}/model.safetensors") for name in ("direct", "served"))
    assert direct.keys() == served.keys()
    for name, tensor in served.items():
        assert tensor.dtype == direct[name].dtype and tensor.shape == direct[name].shape, name
        bits = [part.reshape(-1).view(torch.uint8) for part in (tensor, direct[name])]
        assert torch.equal(*bits), name
    configs = [json.loads(Path(f"{name}/config.json").read_text()) for name in ("direct", "served")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert {file.name for file in Path("direct").iterdir()} >= {"generation_config.json"}


def test_tied_embeddings_are_written_once_and_read_again(tmp_path):
    from transformers import AutoModelForCausalLM

    model = convert(llama(torch.bfloat16, tie_word_embeddings=True), "qat-mxfp8")
    export(model, tmp_path / "served")
    assert "lm_head.weight" not in load_file(tmp_path / "served" / "model.safetensors")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    assert torch.equal(read.lm_head.weight, model.model.embed_tokens.weight)


def test_refusals_leave_nothing(tmp_path):
    model = llama(torch.bfloat16)
    with pytest.raises(UserError, match="no converted layer quantizes a weight"):
        export(model, tmp_path / "served")
    convert(model, "qat-mxfp8")
    with pytest.raises(UserError, match="layout='gguf' is not one of fp8-blocks"):
        export(model, tmp_path / "served", "gguf")
    with pytest.raises(UserError, match="Sequential has no config"):
        export(nn.Sequential(), tmp_path / "served")
    assert not list(tmp_path.iterdir())
    export(model, tmp_path / "served")
    with pytest.raises(UserError, match="exists; force=True replaces it"):
        export(model, tmp_path / "served")
    export(model, tmp_path / "served", force=True)
