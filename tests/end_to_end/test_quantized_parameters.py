"""Weights that are stored and gathered as codes: runs repeat those with BF16 weights to the bit."""

import json
from pathlib import Path

import pytest
import torch
from stored_weights_run import in_bf16, recording
from tiny_run import arguments_for, check_same_tensors, done, metrics, start_from, steps

from megatron_lowbit.megatron.features.quantized_parameters import QuantizedParameters

# isort: split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

STORED = "--quantized-param-gather"
RANKS = 2
COMMON = ("--bf16", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
# A validation in BF16 between the steps, before a checkpoint.
ONE_RANK = (*COMMON, "--precision-recipe", "fp8-tile", "--train-iters", 4, "--save-interval", 2,
            "--eval-interval", 2, "--eval-iters", 1)  # fmt: skip
LINEARS = 4 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64)
CODES = 4 * 128 * (128 + 64 + 256 + 64)  # 128x128 tiles pad the width of 64
OTHERS = 2 * 512 * 64 + 9 * 64

NVFP4 = ("--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", 40000)
TP2 = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
# Codes of one set, gathered in several buckets; of two sets; a tensor's amax over two ranks.
TWO_RANKS = {
    "nvfp4": (*NVFP4, *OVERLAP),
    "mxfp8": ("--precision-recipe", "mxfp8", "--eval-precision", "recipe"),
    "tp2": (*NVFP4, "--recipe-set", "tensor_scale=group", *TP2),
}


def run_of(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without times."""
    return [{k: v for k, v in m.items() if k != "tokens_per_second"} for m in metrics(folder)]


@pytest.fixture
def here(memory, pretrain_here, tmp_path_factory):
    """Folder of two runs of one rank, with stored weights and without, and what they kept."""
    if "here" not in memory:
        memory["here"] = folder = tmp_path_factory.mktemp("here")
        memory["record"] = {
            name: recording(pretrain_here, folder)(*ONE_RANK, *more, "--save", folder / name)
            for name, more in (("plain", ()), ("stored", (STORED,)))
        }
    return memory["here"]


def test_losses_evaluations_and_checkpoints_are_those_of_bf16_weights(here):
    assert any("validation_loss" in m for m in run_of(here / "stored")[:-1])
    assert run_of(here / "stored") == run_of(here / "plain")
    for iteration in (2, 4):
        check_same_tensors(here / "stored", here / "plain", iteration)


def test_an_update_is_skipped_between_an_evaluation_and_a_save(
    pretrain_here, tmp_path, monkeypatch
):
    """Weights that the optimizer does not write are restored to memory that was freed."""
    prepare_grads, steps_taken = DistributedOptimizer.prepare_grads, []

    def skip_third_update(optimizer):
        steps_taken.append(optimizer)
        return prepare_grads(optimizer) or len(steps_taken) == 3

    def overwrite(stored):
        for buffer in stored._buffers:
            buffer.param_data.fill_(torch.nan)
        for group in stored._groups:
            group.is_whole = False

    monkeypatch.setattr(DistributedOptimizer, "prepare_grads", skip_third_update)
    monkeypatch.setattr(QuantizedParameters, "_free", overwrite)
    for name, more in (("plain", ()), ("stored", (STORED,))):
        steps_taken.clear()
        with in_bf16():
            done(pretrain_here(*ONE_RANK, *more, "--save", tmp_path / name))
        assert len(steps_taken) == 4
    assert run_of(tmp_path / "stored") == run_of(tmp_path / "plain")
    check_same_tensors(tmp_path / "stored", tmp_path / "plain", 4)


def test_memory_of_weights_is_freed(here, memory):
    plain, stored = memory["record"]["plain"], memory["record"]["stored"]
    assert plain["parameters"] >= 2 * (LINEARS + OTHERS)
    assert plain["codes"] >= 2 * LINEARS
    # Each tensor begins at a multiple of 256 bytes.
    assert 2 * OTHERS <= stored["parameters"] < 2 * OTHERS + 11 * 256
    assert CODES < stored["codes"] <= CODES + 2 * 16 * 256


@pytest.mark.parametrize("saved, resumed", [("stored", ()), ("plain", (STORED,))])
def test_checkpoints_load_with_and_without(here, pretrain_here, tmp_path, saved, resumed):
    start_from(here / saved, 2, tmp_path / "run")
    arguments = (*ONE_RANK, *resumed, "--load", tmp_path / "run", "--save", tmp_path / "run")
    recording(pretrain_here, tmp_path)(*arguments)
    expected = steps(here / "plain")
    assert steps(tmp_path / "run") == {step: expected[step] for step in (3, 4)}
    check_same_tensors(tmp_path / "run", here / "plain", 4)


@pytest.fixture
def two_ranks(memory, corpus, run_ranks, tmp_path_factory):
    """Function that makes a pair of runs of two ranks once, and returns the folder of both."""

    def run(name: str) -> Path:
        if name not in memory:
            memory[name] = folder = tmp_path_factory.mktemp("ranks")
            job = {}
            for kind, more in (("plain", ()), ("stored", (STORED,))):
                extra = (*COMMON, *TWO_RANKS[name], *more, "--train-iters", 3)
                job[kind] = arguments_for(corpus, (*extra, "--save", folder / kind))
            (folder / "stored.json").write_text(json.dumps(job))
            script = Path(__file__).with_name("run_script.py")
            run_ranks(script, RANKS, folder / "stored.json", timeout=100)
            assert not list(folder.glob("*.error"))
        return memory[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "tp2"])
def test_two_ranks_train_as_with_bf16_weights(two_ranks, name):
    folder = two_ranks(name)
    assert len(steps(folder / "stored")) == 3
    assert run_of(folder / "stored") == run_of(folder / "plain")
    check_same_tensors(folder / "stored", folder / "plain", 3)


def received(folder: Path, number: int) -> int:
    """Return the bytes of parameters that both ranks received in a run."""
    files = [folder / f"{number}.{rank}.json" for rank in range(RANKS)]
    return sum(json.loads(file.read_text())["received"] for file in files)


@pytest.mark.slow
def test_codes_are_gathered_in_place_of_weights(two_ranks):
    plain, stored = (received(two_ranks("nvfp4"), number) for number in range(2))
    # Three steps, and the checkpoint, which has BF16 weights. In this model most of what is sent
    # are embeddings, and beginnings of blocks that many small buckets cut.
    whole = plain // 4
    assert whole == pytest.approx(2 * (LINEARS + OTHERS), rel=0.01)
    assert 2 * OTHERS + LINEARS * 9 / 16 < (stored - whole) / 3 < 0.7 * whole
