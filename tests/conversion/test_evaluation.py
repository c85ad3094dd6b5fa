"""An exported model gives text the likelihood that this project's own evaluation gives it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from training_runs import MODEL

from megatron_lowbit.conversion.convert import to_hugging_face
from megatron_lowbit.megatron.pretrain import main

# isort: split
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

LENGTH, SAMPLES = 32, 8


@pytest.fixture
def write_tokens(tmp_path):
    """Writes a dataset of one document; returns its prefix and its ids."""

    def write(name: str, seed: int) -> tuple[str, torch.Tensor]:
        ids = np.random.default_rng(seed).zipf(1.5, SAMPLES * LENGTH + 1) % 500
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        builder.add_document(torch.tensor(ids), [len(ids)])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        return str(tmp_path / name), torch.tensor(ids)

    return write


def loss(folder: Path, ids: torch.Tensor) -> float:
    """Return the mean loss of tokens (N, length + 1), from transformers' model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten()))


def test_validation_loss_is_the_exported_models(write_tokens, tmp_path):
    """Every sample of one epoch of the validation set once, in whatever order.

    The vocabulary needs no padding: Megatron-LM's loss counts rows without tokens, too.
    """
    train, _ = write_tokens("train", 0)
    valid, ids = write_tokens("valid", 1)
    save, folder = tmp_path / "run", tmp_path / "exported"
    main([
        *MODEL, "--vocab-size", "512", "--seq-length", str(LENGTH), "--micro-batch-size", "2",
        "--global-batch-size", "4",
        "--lr", "1e-2", "--train-iters", "4", "--eval-interval", "100", "--log-interval", "1",
        "--eval-iters", str(SAMPLES // 4), "--save-interval", "100", "--save", str(save),
        "--train-data-path", train, "--valid-data-path", valid, "--tokenizer-type",
        "NullTokenizer", "--num-workers", "0",
    ])  # fmt: skip
    last = json.loads((save / "metrics.jsonl").read_text().splitlines()[-1])
    to_hugging_face(save, folder)
    samples = ids.unfold(0, LENGTH + 1, LENGTH)
    assert samples.shape == (SAMPLES, LENGTH + 1)
    assert last["iteration"] == 4
    assert last["validation_loss"] == pytest.approx(loss(folder, samples), rel=1e-5)
