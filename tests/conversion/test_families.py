"""Tiny random models of transformers': there and back identical, the same logits between."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lowbit.conversion.convert import BESIDE, FAMILIES, to_hugging_face, to_megatron
from megatron_lowbit.errors import UserError

EPS = 3e-6
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 64, "rms_norm_eps": EPS,
}  # fmt: skip
TOKENS = torch.arange(40).reshape(2, 20) % 100


DRAWN = {"initializer_range": 0.3}
ROPE = {"rope_type": "default", "rope_theta": 50000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama_model():
    """Untied, with scaled frequencies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **DRAWN, rope_parameters=LLAMA3))


def tied_llama_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, **DRAWN, tie_word_embeddings=True, rope_parameters=ROPE)
    return LlamaForCausalLM(config)


def mixtral_model():
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **DRAWN, **experts, rope_parameters=ROPE))


MODELS = {"llama": llama_model, "tied llama": tied_llama_model, "mixtral": mixtral_model}


@pytest.fixture(scope="module")
def source(request, tmp_path_factory) -> Path:
    """A folder that transformers saved, in several files."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    model.save_pretrained(folder, max_shard_size="20KB")
    # Of the model itself: loaded anew, transformers 5.23's has rotary frequencies of no value here.
    torch.save(model(TOKENS).logits.detach(), folder / "logits.pt")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama alone, in one file."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    llama_model().save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("source", MODELS, indirect=True)
def test_there_and_back(source, tmp_path):
    """Tensors, tokenizer, and the entries of config.json that the model says nothing of."""
    there, back = tmp_path / "there", tmp_path / "back"
    to_megatron(source, there)
    to_hugging_face(there, back, EPS, shard_bytes=20_000)
    before, after = weights(source), weights(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert len(list(back.glob("*.safetensors"))) > 1
    assert (back / "tokenizer.json").read_text() == "{}"
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    assert {key: now[key] for key in SIZES} == {key: was[key] for key in SIZES}
    assert now["initializer_range"] == 0.3
    family = FAMILIES[now["architectures"][0]]
    assert family.from_config(now).model == family.from_config(was).model


@pytest.mark.parametrize(
    ("source", "ranks"), [("llama", 2), ("tied llama", 1), ("mixtral", 2)], indirect=["source"]
)
def test_the_same_logits(source, tmp_path, ranks):
    """Of transformers and of this project's model, in FP32; two ranks split every layer."""
    to_megatron(source, tmp_path / "there")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(ranks), __file__, str(tmp_path)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    seen, expected = (torch.load(folder / "logits.pt") for folder in (tmp_path, source))
    assert (seen - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_does_not_fit_is_refused(llama, tmp_path):
    """Each in one line, and nothing is left."""
    config = json.loads((llama / "config.json").read_text())
    broken = tmp_path / "broken"
    for change, named in (
        (
            {"architectures": ["NoSuch"]},
            "architecture NoSuch is not one of LlamaForCausalLM, Mixtral",
        ),
        ({"attention_bias": True}, "attention_bias True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0"),
        ({"num_hidden_layers": 4}, r"no tensor model\.layers\.3"),
        ({"num_hidden_layers": 2}, r"tensor model\.layers\.2.* has no place"),
        ({"intermediate_size": 40}, "48 rows; config.json says 40"),
        ({"quantization_config": {}}, "quantized weights"),
    ):
        broken.mkdir()
        save_file(weights(llama), broken / "model.safetensors")
        (broken / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=named):
            to_megatron(broken, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["broken"]
        for file in broken.iterdir():
            file.unlink()
        broken.rmdir()


def test_nothing_is_overwritten(llama, tmp_path):
    to_megatron(llama, tmp_path / "out")
    with pytest.raises(UserError, match="out exists; --force replaces it"):
        to_megatron(llama, tmp_path / "out")
    to_megatron(llama, tmp_path / "out", force=True)
    assert (tmp_path / "out" / BESIDE / "config.json").is_file()


def worker(folder: Path) -> None:
    """Logits of the converted model, gathered by rank 0."""
    from megatron_lowbit.integrations.megatron_core.config import transformer_config
    from megatron_lowbit.integrations.megatron_core.models import build_model
    from megatron_lowbit.kernels.engine import reference
    from megatron_lowbit.recipes import load_recipe
    from megatron_lowbit.training.arguments import parse_arguments
    from megatron_lowbit.training.checkpoint import load_checkpoint
    from megatron_lowbit.training.distributed import initialize_distributed, shutdown

    ranks = int(os.environ["WORLD_SIZE"])
    args = parse_arguments([
        f"@{folder}/there/model.args", "--seq-length", "20", "--micro-batch-size", "2", "--lr", "1",
        "--train-iters", "1", "--data-path", "unused",
        "--tensor-model-parallel-size", str(ranks),
        *(["--sequence-parallel"] if ranks > 1 else []),
    ])  # fmt: skip
    initialize_distributed(args)
    config, recipe = transformer_config(args, torch.float32), load_recipe("bf16", [])
    chunks = build_model(args, config, recipe, reference("a test"), 100)
    saved = json.loads((folder / "there" / "iter_0000000" / "lowbit.json").read_text())
    load_checkpoint(folder / "there", chunks, None, None, saved["state"]["model"])
    positions = torch.arange(20).expand(2, -1)
    with torch.no_grad():
        logits = chunks[0].eval()(TOKENS, positions, attention_mask=None)
    parts = [torch.empty_like(logits) for _ in range(ranks)]
    torch.distributed.all_gather(parts, logits.contiguous())
    if torch.distributed.get_rank() == 0:
        torch.save(torch.cat(parts, dim=-1), folder / "logits.pt")
    shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    worker(Path(sys.argv[1]))
