"""Runs whose blend of datasets changes, with an end and a resumption at each transition."""

import numpy as np
import pytest
from tiny_run import done, metrics, refused

from megatron_lowbit.megatron import forward_step

# isort: split
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

PHASES = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 500, "--split", "80,20,0",
          "--phase-transition-iterations", "2,4", "--train-iters", 6, "--lr-decay-iters", 6,
          "--fp4-recipe", "nvfp4")  # fmt: skip
WEB, CODE = range(10, 100), range(200, 290)


@pytest.fixture
def datasets(tmp_path):
    """Two datasets without common tokens."""
    for name, ids in (("web", WEB), ("code", CODE)):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        for _ in range(40):
            builder.add_document(ids.start + np.arange(100) % len(ids), [100])
        builder.finalize(str(tmp_path / f"{name}.idx"))
    return str(tmp_path / "web"), str(tmp_path / "code")


@pytest.fixture
def tokens_seen(monkeypatch):
    """First tokens of the samples that a run loads."""
    seen: list[int] = []
    original = forward_step._check_ids

    def look(loaded, args):
        seen.extend(loaded["tokens"][:, 0].tolist())
        original(loaded, args)

    monkeypatch.setattr(forward_step, "_check_ids", look)
    return seen


def test_each_phase_has_its_blend(pretrain_here, datasets, tokens_seen, tmp_path):
    """The learning rate's schedule covers the three phases."""
    web, code = datasets
    run = ("--save", tmp_path / "run", "--load", tmp_path / "run")
    first, second = ((0.9, web, 0.1, code), WEB), ((0.1, web, 0.9, code), CODE)
    for blend, most in (first, second, first):
        tokens_seen.clear()
        done(pretrain_here(*PHASES, *run, "--data-path", *blend))
        training = tokens_seen[:8]  # 2 iterations of 4; the evaluation comes after them
        assert len(set(tokens_seen) - set(WEB) - set(CODE)) == 0
        assert sum(token in most for token in training) >= 6
    rates = [line["learning_rate"] for line in metrics(tmp_path / "run") if "lm_loss" in line]
    assert rates == pytest.approx([1e-2 * (1 - step / 6) for step in range(1, 7)])


def test_phases_need_one_batch_size(pretrain_here):
    schedule = ("--step-batch-size-schedule", "0:2 128:4")
    refusal = refused(pretrain_here(*PHASES, "--mock-data", *schedule))
    assert "constant --global-batch-size" in refusal
