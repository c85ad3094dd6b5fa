"""gpt-oss as it is released, with experts in MXFP4: read, trained, and written again."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import config_of, layer_tensor, make_model, weights
from training_runs import record_weights, train

from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.conversion.verify import verify
from tests.short_runs import saved_tensors, without_pictures

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 4, 64, 32
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
ONLY_EXPERTS = "matchers.linears.pattern='*.experts.*'"
QAT = QuantizedAs("gpt-oss", ["qat-mxfp4"], [ONLY_EXPERTS])


def random_blocks(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw codes and scales of experts; each block's largest code is 4 or 6."""
    codes = torch.randint(0, 16, (EXPERTS, rows, columns // 32, 32))
    codes[..., 7] = torch.randint(0, 2, codes.shape[:-1]) * 8 + 6
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    scales = torch.randint(118, 123, codes.shape[:-1])
    return blocks.to(torch.uint8), scales.to(torch.uint8)


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A folder with the tensors of openai/gpt-oss-20b, but smaller ones."""
    folder = tmp_path_factory.mktemp("released")
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS}
    model = make_model("gpt-oss", **sizes, vocab_size=500)
    model.bfloat16().save_pretrained(folder)
    tensors = weights(folder)
    for layer in range(LAYERS):
        experts = f"model.layers.{layer}.mlp.experts"
        for name, rows, columns in (
            ("gate_up_proj", 2 * WIDTH, HIDDEN),
            ("down_proj", HIDDEN, WIDTH),
        ):
            del tensors[f"{experts}.{name}"]
            blocks, scales = random_blocks(rows, columns)
            tensors |= {f"{experts}.{name}_blocks": blocks, f"{experts}.{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = config_of(folder)
    config["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoint(released, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "checkpoint"
    to_megatron(released, folder)
    return folder


def dequantized(tensors: dict[str, torch.Tensor], experts: str, name: str) -> torch.Tensor:
    """Return the weights that transformers reads: (E, out, in)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = (tensors[f"{experts}.{name}_{part}"] for part in ("blocks", "scales"))
    return convert_moe_packed_tensors(blocks, scales).transpose(1, 2)


def test_mxfp4_is_read_as_transformers_reads_it(released, checkpoint):
    tensors = weights(released)
    for layer in range(LAYERS):
        pair, down = (
            dequantized(tensors, f"model.layers.{layer}.mlp.experts", name)
            for name in ("gate_up_proj", "down_proj")
        )
        for expert in range(EXPERTS):
            slices = (layer, expert), (LAYERS, EXPERTS)
            fc1, fc2 = (
                layer_tensor(checkpoint, f"mlp.experts.experts.{key}", *slices)
                for key in ("linear_fc1", "linear_fc2")
            )
            assert torch.equal(fc1, torch.cat([pair[expert, ::2], pair[expert, 1::2]]))
            assert torch.equal(fc2, down[expert])


def test_without_training_every_bit_comes_back(released, checkpoint, tmp_path):
    to_hugging_face(checkpoint, tmp_path / "out", quantized=QAT)
    before, after = weights(released), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    config = config_of(tmp_path / "out")
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    difference, largest = verify(tmp_path / "out", checkpoint, quantized=QAT)
    assert difference <= 1e-5 * largest


def test_small_codes_keep_their_values(tmp_path, released):
    """The largest code of a block becomes 4 or 6, with a smaller scale."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((released / "config.json").read_text())
    before = weights(released)
    for name in list(before):
        if name.endswith("_blocks"):  # codes up to 3, or up to 1
            before[name] = torch.randint(0, 256, before[name].shape, dtype=torch.uint8) & 0xDD
    save_file(before, source / "model.safetensors")
    to_megatron(source, tmp_path / "there")
    to_hugging_face(tmp_path / "there", tmp_path / "out", quantized=QAT)
    after = weights(tmp_path / "out")
    for name in ("gate_up_proj", "down_proj"):
        seen, expected = (
            dequantized(tensors, "model.layers.1.mlp.experts", name) for tensors in (after, before)
        )
        assert torch.equal(seen, expected)


def test_an_export_has_the_codes_that_training_multiplied(
    released, checkpoint, tmp_path, monkeypatch
):
    """After two updates, against the operands of the third iteration's forward."""
    seen = record_weights(monkeypatch)
    train(f"@{checkpoint}/model.args", "--load", checkpoint, "--finetune", "--train-iters", 3,
          "--save", tmp_path / "run", "--save-interval", 2, "--precision-recipe", "qat-mxfp4",
          "--recipe-set", ONLY_EXPERTS)  # fmt: skip
    to_hugging_face(
        tmp_path / "run" / "iter_0000002", tmp_path / "out", quantized=QuantizedAs("gpt-oss")
    )
    tensors = weights(tmp_path / "out")
    microbatch = iter(seen[-2 * LAYERS * EXPERTS :])
    for layer in range(LAYERS):
        experts = f"model.layers.{layer}.mlp.experts"
        for expert in range(EXPERTS):
            for name in ("gate_up_proj", "down_proj"):
                weight = next(microbatch)
                blocks = tensors[f"{experts}.{name}_blocks"][expert].flatten(1)
                scales = tensors[f"{experts}.{name}_scales"][expert]
                if name == "gate_up_proj":
                    blocks, scales = (torch.cat([t[::2], t[1::2]]) for t in (blocks, scales))
                assert torch.equal(weight.codes, blocks)
                assert torch.equal(weight.scales, scales)
    first = "model.layers.0.mlp.experts.down_proj_blocks"
    assert not torch.equal(tensors[first], weights(released)[first])  # the updates changed codes


def train_once(checkpoint: Path, save: Path, *arguments: object) -> None:
    # Without clipping, by a norm that layouts sum in other orders.
    train(f"@{checkpoint}/model.args", "--load", checkpoint, "--finetune", "--train-iters", 1,
          "--save", save, "--clip-grad", 1e6, *arguments)  # fmt: skip


@pytest.mark.slow
def test_gradients_over_two_ranks_are_those_of_one(checkpoint, run_ranks, tmp_path):
    """Adam's first moments, also of experts' biases, whose experts both ranks hold."""
    train_once(checkpoint, tmp_path / "one")
    run_ranks(__file__, 2, checkpoint, tmp_path / "two", timeout=200)
    single, two = (
        saved_tensors(tmp_path / name / "iter_0000001", "optimizer.state.exp_avg.")
        for name in ("one", "two")
    )
    assert sum(key.endswith(("bias", "softmax_offset")) for key in single) == 6
    for key, expected in single.items():
        assert (two[key] - expected).norm() <= 1e-4 * expected.norm(), key


if __name__ == "__main__":
    with without_pictures():
        layout = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
        train_once(*map(Path, sys.argv[1:3]), *layout)
