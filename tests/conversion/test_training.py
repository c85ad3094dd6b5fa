"""Converted models in Megatron-LM's training loop, and trained ones in transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import EPS, make_model
from training_runs import MODEL, losses, model_tensors, train

from megatron_lowbit.checkpoints.reader import other_name
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.verify import verify
from megatron_lowbit.megatron import pretrain
from tests.marks import others_slow

# isort: split
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

EXPERTS = ("--num-experts", 4, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 96)
HYBRID = [
    "--hybrid-layer-pattern", "M*-M", "--hidden-size", 64, "--num-attention-heads", 4,
    "--mamba-state-dim", 16, "--mamba-head-dim", 16, "--mamba-num-groups", 2, "--squared-relu",
    "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "none",
    "--untie-embeddings-and-output-weights", "--max-position-embeddings", 32, "--vocab-size", 500,
    "--hidden-dropout", 0, "--attention-dropout", 0,
]  # fmt: skip
GPT2 = [
    "--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4, "--openai-gelu",
    "--max-position-embeddings", 32, "--vocab-size", 500, "--hidden-dropout", 0,
    "--attention-dropout", 0,
]  # fmt: skip
QWEN3_MOE = [*MODEL, *EXPERTS, "--qk-layernorm", "--moe-layer-freq", "[1,0,1,1]"]
GROUPS = ("--group-query-attention", "--num-query-groups", "2")
LATENT = [argument for argument in MODEL if argument not in GROUPS]
DEEPSEEK_V3 = [
    *LATENT, *EXPERTS, "--multi-latent-attention", "--qk-layernorm", "--q-lora-rank", 24,
    "--kv-lora-rank", 16, "--qk-head-dim", 16, "--qk-pos-emb-head-dim", 8, "--v-head-dim", 16,
    "--norm-epsilon", 1e-6, "--rope-type", "rope", "--moe-layer-freq", "[0,1,1,1]",
    "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias",
    "--moe-shared-expert-intermediate-size", 96,
]  # fmt: skip
TRAINED = {
    "llama": (MODEL, "nvfp4"), "mixtral": ([*MODEL, *EXPERTS], "bf16"),
    "gpt-2": (GPT2, "bf16"), "nemotron-h": (HYBRID, "mxfp8"), "qwen3-moe": (QWEN3_MOE, "mxfp8"),
    "deepseek-v3": (DEEPSEEK_V3, "bf16"),
}  # fmt: skip
SOURCES = (
    "tied llama", "mixtral", "gpt-2", "nemotron-h", "qwen3-moe", "deepseek-v3", "gemma-3", "glm-4",
    "granite", "nemotron", "qwen2-moe", "deepseek-v2", "bamba",
)  # fmt: skip


@pytest.mark.parametrize("name", others_slow(SOURCES, ("nemotron-h",)))
def test_a_converted_model_is_trained(name, tmp_path):
    """A step with a rate of 0 leaves every tensor as it was; one more with another changes it.

    The trained model then has the same logits in transformers.
    """
    torch.manual_seed(0)
    make_model(name).save_pretrained(tmp_path / "source")
    start, same, other = (tmp_path / part for part in ("start", "same", "other"))
    to_megatron(tmp_path / "source", start)
    run = (f"@{start}/model.args", "--load", start, "--finetune", "--train-iters", 1)
    bias = ("--moe-router-bias-update-rate", 0)  # no rate of the optimizer's
    train(*run, *bias, "--lr", 0, "--save", same)
    assert losses(same).keys() == {1}
    before, after = model_tensors(start / "iter_0000000"), model_tensors(same / "iter_0000001")
    assert after.keys() <= before.keys()
    norms = {name for key in after for name in before if other_name(name) == other_name(key)}
    assert before.keys() - after.keys() <= norms
    assert all(torch.equal(before[key], tensor) for key, tensor in after.items())
    train(*run, "--lr", 1e-3, "--save", other, "--precision-recipe", "mxfp8")
    changed = model_tensors(other / "iter_0000001")
    assert not torch.equal(
        changed["embedding.word_embeddings.weight"], before["embedding.word_embeddings.weight"]
    )
    to_hugging_face(other, tmp_path / "out", companions=start / "hugging_face")
    difference, largest = verify(tmp_path / "out", other, tokens=range(20))
    assert difference <= 1e-5 * largest


@pytest.mark.slow
def test_a_larger_vocabulary_and_the_checkpoint_s_own_arguments(tmp_path):
    """Rows that only pad are allowed, for tensor parallelism; --use-checkpoint-args knows all."""
    torch.manual_seed(0)
    make_model("tied llama").save_pretrained(tmp_path / "source")
    start = tmp_path / "start"
    to_megatron(tmp_path / "source", start)
    shared = ("--load", start, "--finetune", "--train-iters", 1, "--lr", 0)
    padded, named = tmp_path / "padded", tmp_path / "named"
    train(f"@{start}/model.args", *shared, "--padded-vocab-size", 128, "--save", padded)
    train("--use-checkpoint-args", *shared, "--norm-epsilon", EPS, "--vocab-size", 100,
          "--save", named)  # fmt: skip
    before, after = (
        model_tensors(path)["embedding.word_embeddings.weight"]
        for path in (start / "iter_0000000", padded / "iter_0000001")
    )
    assert after.shape == (128, 32) and torch.equal(after[:100], before)
    family = to_hugging_face(padded, tmp_path / "back")
    assert family.model["vocab_size"] == 100
    again = model_tensors(named / "iter_0000001")["embedding.word_embeddings.weight"]
    assert torch.equal(again, before)


@pytest.mark.parametrize("name", others_slow(TRAINED, ("llama", "qwen3-moe")))
def test_a_trained_model_in_transformers(name, tmp_path):
    """Megatron-LM's checkpoint has the same logits in both, with as many tokens as trained."""
    arguments, recipe = TRAINED[name]
    run, folder = tmp_path / "run", tmp_path / "converted"
    train(*arguments, "--train-iters", 1, "--save", run, "--precision-recipe", recipe)
    family = to_hugging_face(run, folder)
    assert family.model["vocab_size"] == 500
    difference, largest = verify(folder, run)
    assert difference <= 1e-5 * largest


LENGTH, SAMPLES = 32, 8


def write_tokens(prefix: Path, seed: int) -> torch.Tensor:
    """Write a dataset of one document; return its ids."""
    ids = np.random.default_rng(seed).zipf(1.5, SAMPLES * LENGTH + 1) % 500
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return torch.tensor(ids)


def test_validation_loss_is_that_of_the_exported_model(tmp_path):
    """Every sample of one epoch of the validation set once, in whatever order.

    The vocabulary needs no padding: Megatron-LM's loss counts rows without tokens, too.
    """
    write_tokens(tmp_path / "train", 0)
    ids = write_tokens(tmp_path / "valid", 1)
    save, folder = tmp_path / "run", tmp_path / "exported"
    pretrain.main([
        *MODEL, "--vocab-size", "512", "--seq-length", str(LENGTH), "--micro-batch-size", "2",
        "--global-batch-size", "4",
        "--lr", "1e-2", "--train-iters", "4", "--eval-interval", "100", "--log-interval", "1",
        "--eval-iters", str(SAMPLES // 4), "--save-interval", "100", "--save", str(save),
        "--train-data-path", str(tmp_path / "train"), "--valid-data-path",
        str(tmp_path / "valid"), "--tokenizer-type", "NullTokenizer", "--num-workers", "0",
    ])  # fmt: skip
    last = json.loads((save / "metrics.jsonl").read_text().splitlines()[-1])
    to_hugging_face(save, folder)
    samples = ids.unfold(0, LENGTH + 1, LENGTH)
    assert samples.shape == (SAMPLES, LENGTH + 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(samples[:, :-1]).logits.flatten(0, 1).double()
    assert last["iteration"] == 4
    loss = float(F.cross_entropy(logits, samples[:, 1:].flatten()))
    assert last["validation_loss"] == pytest.approx(loss, rel=1e-5)
