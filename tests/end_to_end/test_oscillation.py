"""Reset of oscillating weights in a run: which weights, and checkpoints."""

from argparse import Namespace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_run import (
    ONE_MICROBATCH,
    OTHER_RECIPE,
    check_same_tensors,
    done,
    saved_tensors,
    start_from,
    steps,
)

from megatron_lowbit import quantize
from megatron_lowbit.megatron.run.steps import steps_of
from tests.short_runs import hooked_runs

START, OVER, LENGTH, SAVED = 2, 3, 8, 4
RESET = f"oscillation={{start: {START}, period: 5, over: {OVER}, ratio: 1.5}}"
NVFP4 = ("--fp4-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none", *ONE_MICROBATCH)
OSCILLATION = (*NVFP4, "--recipe-set", RESET)
FC2 = "decoder.layers.1.mlp.linear_fc2"


@pytest.fixture
def whole(memory, pretrain_here, tmp_path_factory):
    """Folder of a run, FC2's weights as iterations begin, before and after resets, its output."""
    if memory:
        return memory["whole"]
    folder = tmp_path_factory.mktemp("oscillation") / "whole"
    seen: dict[tuple[int, str], torch.Tensor] = {}

    def watch(chunks: list, args: Namespace) -> None:
        layer = chunks[0].get_submodule(FC2)

        def note(when: str, iteration: int, training: bool) -> None:
            seen[iteration, when] = layer.weight.detach().clone()

        listeners = steps_of(args, chunks).listeners
        listeners.insert(0, partial(note, "before"))
        listeners.append(partial(note, "after"))

    with hooked_runs(watch):
        result = pretrain_here(*OSCILLATION, "--train-iters", LENGTH, "--save-interval", SAVED,
                               "--save", folder)  # fmt: skip
    done(result)
    memory["whole"] = folder, seen, result.stdout
    return memory["whole"]


def test_which_weights_are_reset(whole):
    """The weights of the definition, computed only from the weights in iterations 2 to 5."""
    seen = whole[1]
    weights = [seen[i, "before"] for i in range(START, START + OVER + 1)]
    values = [quantize(weight, "nvfp4-2d").dequantize() for weight in weights]
    way, way_of_values = (
        sum(np.abs((b - a).numpy()) for a, b in pairwise(path)) for path in (weights, values)
    )
    oscillates = torch.from_numpy(way_of_values >= 1.5 * way) & torch.from_numpy(way > 0)
    assert 0.02 < oscillates.float().mean() < 0.98
    expected = torch.where(oscillates, values[-1], weights[-1])
    assert torch.equal(seen[START + OVER, "after"], expected)
    for iteration in set(range(LENGTH)) - {START + OVER}:
        assert torch.equal(seen[iteration, "before"], seen[iteration, "after"])


@pytest.mark.slow
def test_a_resumed_run_resets_the_same_weights(whole, pretrain_here, tmp_path):
    """It was saved within the measurement, and after it."""
    folder = whole[0]
    first, last = (folder / f"iter_{i:07d}" for i in (SAVED, LENGTH))
    assert len(saved_tensors(first, "oscillation.")) == 2 * 16
    # Iteration 7 begins the next measurement.
    assert saved_tensors(last, "oscillation.").keys() == saved_tensors(first, "oscillation.").keys()
    save = start_from(folder, SAVED, tmp_path / "resumed")
    done(pretrain_here(*OSCILLATION, "--train-iters", LENGTH, "--load", save, "--save", save))
    assert steps(save) == {k: v for k, v in steps(folder).items() if k > SAVED}
    check_same_tensors(save, folder, LENGTH)


@pytest.mark.slow
def test_without_it_the_run_goes_on_otherwise(whole, pretrain_here, tmp_path):
    """The checkpoint's paths are not loaded.

    The step of the reset is the same: a reset weight has the codes that it had before.
    """
    save = start_from(whole[0], SAVED, tmp_path / "plain")
    resumed = ("--train-iters", LENGTH, "--load", save, "--save", save)
    done(pretrain_here(*NVFP4, *resumed, *OTHER_RECIPE))
    same = {k: steps(save)[k] == v for k, v in steps(whole[0]).items() if k > SAVED}
    assert same == {5: True, 6: True, 7: False, 8: False}
    assert saved_tensors(save / "iter_0000008", "oscillation.") == {}


def test_it_is_announced_and_logged(whole):
    folder, _, output = whole
    assert "oscillation: weights with R >= 1.5 over 3 iterations are reset" in output
    assert "iteration 5: " in output and "% of the quantized weights" in output
    assert '"oscillation/reset": ' in (folder / "metrics.jsonl").read_text()
