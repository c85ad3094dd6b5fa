"""A checkpoint saved in one layout loads in any other, its optimizer's state included, to the bit.

A run that loads the iteration it should end at trains nothing, and saves again in its own layout:
so checkpoints are passed on here. The vocabulary is padded alike in all layouts.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import resaving_rank
import torch
from tiny_run import ENVIRONMENT, HYBRID, arguments_for, done, losses, start_from
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.pretrain import pretrain

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ITERATIONS = 2
# Four groups of keys and values, to be split over four ranks; histories shorter than usual.
MODEL = ("--num-query-groups", 4, "--train-iters", ITERATIONS, "--lr-warmup-iters", 1,
         "--fp8-recipe", "fp8-delayed", "--recipe-set", "amax_history.length=4")  # fmt: skip
EXPERTS = ("--num-experts", 4, "--moe-ffn-hidden-size", 64, "--moe-layer-freq", "[0,1,0,1]",
           "--moe-aux-loss-coeff", 0.01)  # fmt: skip
DISTRIBUTED = ("--use-distributed-optimizer",)
OPTIMIZERS = {"plain": (), "distributed": DISTRIBUTED}

TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
SP = ("--sequence-parallel",)
INTERLEAVED = (*PP2, "--num-layers-per-virtual-pipeline-stage", 1)
EP2 = ("--expert-model-parallel-size", 2)


@dataclass(frozen=True)
class Layout:
    processes: int
    arguments: tuple = ()


LAYOUTS = {
    "single": Layout(1),
    "tp2": Layout(2, TP2),
    "tp2 sp": Layout(2, (*TP2, *SP)),
    "pp2": Layout(2, PP2),
    "pp2 interleaved": Layout(2, INTERLEAVED),
    "dp2": Layout(2),
    "tp4 sp": Layout(4, ("--tensor-model-parallel-size", 4, *SP)),
    "tp2 pp2": Layout(4, (*TP2, *PP2)),
    "tp2 dp2": Layout(4, TP2),
    "pp2 dp2": Layout(4, PP2),
}
EXPERT_LAYOUTS = {
    "single": Layout(1),
    "dp2": Layout(2),
    "ep2": Layout(2, EP2),
    "pp2": Layout(2, PP2),
    "ep2 tp2": Layout(4, (*EP2, *TP2, *SP)),
    "ep2 pp2": Layout(4, (*EP2, *PP2)),
}
HYBRID_LAYOUTS = {name: LAYOUTS[name] for name in LAYOUTS if name != "pp2 interleaved"}
# Model -> its layouts and arguments. Tied, the last pipeline stage has a copy of the embedding.
MODELS = {"untied": (LAYOUTS, ()), "tied": (LAYOUTS, ()), "experts": (EXPERT_LAYOUTS, EXPERTS),
          "hybrid": (HYBRID_LAYOUTS, HYBRID)}  # fmt: skip


def content(folder: Path, iteration: int = ITERATIONS) -> dict[str, Any]:
    """All that a checkpoint holds, by key: whole tensors, and what is not split over ranks."""
    checkpoint = folder / f"iter_{iteration:07d}"
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        # What no shard covers stays NaN, which equals nothing.
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    found = dict.fromkeys(stored) | tensors
    found["common.pt"] = torch.load(checkpoint / "common.pt", weights_only=True)
    document = json.loads((checkpoint / "lowbit.json").read_text())
    found["lowbit.json"] = {k: v for k, v in document.items() if k not in ("files", "blake2b")}
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The keys under which two checkpoints' content is not the same to the bit."""
    return [
        key
        for key in sorted(one.keys() | other.keys())
        if key not in one or key not in other or not _same(one[key], other[key])
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


# -- in `make test`: one chain, and training that goes on ------------------------------------------

CHAIN = ("single", "tp2 sp", "pp2", "dp2", "pp2 interleaved", "tp2", "back")
# No recipe: FP32 throughout. Optimizer -> layouts that train on, each from what the one before
# left; two steps each, for only the second's loss depends on the moments that were loaded.
GOES_ON = {
    "plain": ("tp2 sp", "pp2 interleaved"),
    "distributed": ("pp2", "dp2"),
}
UNQUANTIZED = ("--num-query-groups", 4, "--lr", 1e-3)
# Unclipped, for a norm depends on how the buckets of gradients are cut.
OVERLAP = {"overlap": ("--overlap-grad-reduce", "--overlap-param-gather"), "no overlap": ()}
OVERLAPPED = (*DISTRIBUTED, "--clip-grad", 0, "--train-iters", 2, "--save-interval", 1)


@pytest.fixture
def runs(memory, pretrain_here, pretrain_ranks, tmp_path) -> Path:
    """The folder of folders of all runs of the tests in this section."""
    if memory:
        return memory["folder"]
    chain = (*MODEL, *DISTRIBUTED)
    done(pretrain_here(*chain, "--save", tmp_path / "single"))
    jobs = {
        reader: passed_on(tmp_path, chain, writer, reader, LAYOUTS[reader])
        for writer, reader in pairwise(CHAIN[:-1])
    }
    for optimizer, layouts in GOES_ON.items():
        model, source = (*UNQUANTIZED, *OPTIMIZERS[optimizer]), tmp_path / f"{optimizer} single"
        steps = 2 * len(layouts) + 2
        done(pretrain_here(*model, "--train-iters", steps, "--save-interval", 2, "--save", source))
        source = start_from(source, 2, tmp_path / f"{optimizer} start")
        for last, name in zip(range(4, steps + 1, 2), layouts, strict=True):
            save = tmp_path / f"{optimizer} {name}"
            jobs[save.name] = (*model, *LAYOUTS[name].arguments, "--train-iters", last,
                               "--load", source, "--save", save)  # fmt: skip
            source = save
    for name, arguments in OVERLAP.items():
        jobs[name] = (*UNQUANTIZED, *OVERLAPPED, *arguments, "--save", tmp_path / name)
    pretrain_ranks(jobs)
    done(pretrain_here(*passed_on(tmp_path, chain, CHAIN[-2], "back", LAYOUTS["single"])))
    memory["folder"] = tmp_path
    return tmp_path


def passed_on(folder: Path, model: tuple, source: str, name: str, layout: Layout) -> tuple:
    """The run that loads the checkpoint in folder ``source`` and saves it in folder ``name``."""
    return (*model, *layout.arguments, "--load", folder / source, "--save", folder / name)


def test_a_chain_of_layouts_ends_with_what_it_began(runs):
    contents = {name: content(runs / name) for name in CHAIN}
    first = contents["single"]
    for kind in ("embedding.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.",
                 "optimizer.state.param.", "amax_history.decoder.layers.3."):  # fmt: skip
        values = [tensor for key, tensor in first.items() if key.startswith(kind)]
        assert values and all(tensor.any() for tensor in values), kind
    groups = first["common.pt"]["optimizer"]["optimizer"]["param_groups"]
    assert {group["step"] for group in groups} == {ITERATIONS}
    for name in CHAIN[1:]:
        assert differences(first, contents[name]) == [], name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_in_other_layouts(runs, optimizer):
    whole = losses(runs / f"{optimizer} single")
    for number, name in enumerate(GOES_ON[optimizer]):
        first = 3 + 2 * number
        expected = {step: whole[step] for step in (first, first + 1)}
        assert losses(runs / f"{optimizer} {name}") == pytest.approx(expected, rel=1e-5), name


def test_a_checkpoint_does_not_depend_on_overlapped_communication(runs):
    """Without the gather that saving forces, each rank would hold old parameters of the other's.

    No evaluation, which gathers too, comes before the first of these.
    """
    for iteration in (1, 2):
        one, other = (content(runs / name, iteration) for name in OVERLAP)
        assert differences(one, other) == []


# -- every ordered pair, and training on in every layout -------------------------------------------


@pytest.fixture
def job(corpus, tmp_path):
    """Makes several runs in one torchrun job; see ``resaving_rank``."""

    def run(processes: int, runs: list) -> None:
        file = tmp_path / "job.json"
        file.write_text(json.dumps(runs, default=str))
        command = [*TORCHRUN, str(processes), resaving_rank.__file__, str(file)]
        done(subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900))

    return run


@pytest.fixture(params=[(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS],
                ids=" ".join)  # fmt: skip
def family(request, corpus):
    """(layouts, function that completes the arguments) of one kind of model and optimizer."""
    model, optimizer = request.param
    layouts, options = MODELS[model]

    def arguments(*extra) -> list[str]:
        found = arguments_for(corpus, (*options, *OPTIMIZERS[optimizer], *extra))
        return [text for text in found if model != "tied" or not text.startswith("--untie")]

    return layouts, arguments


@pytest.mark.slow
def test_every_pair_of_layouts(family, job, tmp_path):
    """One checkpoint of each layout, made from the single process's, is read by every other."""
    layouts, arguments = family
    pretrain(parse_arguments(arguments(*MODEL, "--save", tmp_path / "single")))
    pairs = {(one, other) for one in layouts for other in layouts if one != other}
    firsts = {pair for pair in pairs if pair[0] == "single"}
    for group, processes in ((firsts, 2), (firsts, 4), *((pairs - firsts, n) for n in (1, 2, 4))):
        runs = []
        for reader in [name for name in layouts if layouts[name].processes == processes]:
            copies = {
                str(saved_by(tmp_path, writer)): str(tmp_path / f"{writer} to {reader}")
                for writer in sorted(writer for writer, to in group if to == reader)
            }
            options = (*MODEL, *layouts[reader].arguments, "--save", tmp_path / "metrics")
            runs.append([arguments(*options), copies])
        job(processes, runs)
    first = content(tmp_path / "single")
    for writer, reader in sorted(pairs):
        passed = content(tmp_path / f"{writer} to {reader}")
        assert differences(first, passed) == [], (writer, reader)


def saved_by(folder: Path, writer: str) -> Path:
    return folder / (writer if writer == "single" else f"single to {writer}")


@pytest.mark.slow
def test_training_goes_on_in_every_layout(family, job, tmp_path):
    """What files cannot show: that all copies of a parameter and its moments were loaded."""
    layouts, arguments = family
    options = (*UNQUANTIZED, "--save-interval", 2, "--train-iters", 4)
    pretrain(parse_arguments(arguments(*options, "--save", tmp_path / "single")))
    source = start_from(tmp_path / "single", 2, tmp_path / "start")
    others = [name for name in layouts if name != "single"]
    for processes in (2, 4):
        names = [name for name in others if layouts[name].processes == processes]
        commands = [
            (*options, *layouts[name].arguments, "--load", source, "--save", tmp_path / name)
            for name in names
        ]
        job(processes, [[arguments(*command), {}] for command in commands])
    expected = {step: loss for step, loss in losses(tmp_path / "single").items() if step > 2}
    for name in others:
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5), name
