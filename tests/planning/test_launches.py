"""The CPU's part of a step: by hand, and as the runs had it that a GPU does in no time."""

import pytest

from megatron_lowbit.planning.communication import Cluster
from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.estimate import repeated, waiting
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import candidate_of
from megatron_lowbit.planning.search import plan
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import load_recipes


@pytest.mark.parametrize(
    ("phases", "idle"),
    [
        ([], 0.0),
        ([(1.0, 4.0), (1.0, 4.0)], 0.0),
        ([(4.0, 1.0), (4.0, 1.0)], 6.0),
        # The forward pass is launched in 3 and done in 1: idle for 2, and never again.
        ([(3.0, 1.0), (1.0, 5.0)], 2.0),
        # 4 ahead after the first phase, which the second, 5 slower, takes up.
        ([(1.0, 5.0), (6.0, 1.0)], 1.0),
    ],
)
def test_a_gpu_waits_for_what_is_not_launched_yet(phases, idle):
    assert waiting(phases) == pytest.approx(idle)


@pytest.mark.parametrize("times", [1, 2, 3, 7])
@pytest.mark.parametrize("first", [1.0, 4.0])
@pytest.mark.parametrize("second", [0.5, 6.0])
def test_repetitions_as_few_phases_wait_as_long(times, first, second):
    phases, step = [(first, 2.0), (second, 3.0)], [(9.0, 1.0)]
    expected = pytest.approx(waiting(times * phases + step))
    assert waiting(repeated(phases, times) + step) == expected
    assert len(repeated(phases, 2**63)) == 5


def step(words: str) -> dict[str, float]:
    ranks = 2 if "--tensor-model-parallel-size 2" in words else 1
    args = TrainingArguments(words.split()).parse(ranks)
    device = Device(gpu("h200"), False, "torch")
    recipe = load_recipes(args.precision_recipe, args.recipe_set)
    (found,) = plan([candidate_of(args, ranks)], recipe, 4096, device, Cluster(device.gpu, 8))
    return found.seconds


SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
    "--micro-batch-size 1 --global-batch-size 3 --bf16 "
)


@pytest.mark.parametrize(
    ("recipe", "linear"),
    [("bf16", 0), ("fp8-tile", 2 * 312), ("nvfp4 --recipe-set bf16_blocks=none", 2 * (312 + 289))],
)
def test_a_tiny_model_takes_what_the_cpu_does(recipe, linear):
    seconds = step(SMALL + f"--precision-recipe {recipe}")
    parts = 4 * 2 * (1200 + 800 + 2 * linear)
    # But for the weights, which a GPU quantizes once a step: microseconds.
    expected = pytest.approx(1e-6 * (3 * parts + (4 * 6 + 3) * 170 + 10000), rel=1e-3)
    assert sum(seconds.values()) == expected


def test_graphs_leave_what_is_between_steps():
    recipe = "--precision-recipe nvfp4 --cuda-graph-impl local"
    waits = step(SMALL + recipe)["waiting for the CPU"]
    # Four layers of six tensors, and three around them; less what the optimizer takes the GPU.
    assert 10e-3 < waits < 1e-6 * ((4 * 6 + 3) * 170 + 10000)


EXPERTS = (
    SMALL + "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --precision-recipe bf16 "
)


def test_grouped_experts_are_launched_together():
    alone, grouped = (sum(step(EXPERTS + more).values()) for more in ("", "--moe-grouped-gemm"))
    # Three microbatches of four layers: seven times less a part's passes, but two linear layers.
    saved = 3 * 4 * (7 * (1200 + 800) - 8 * 2 * 2 * 34)
    assert alone - grouped == pytest.approx(1e-6 * saved, rel=1e-2)


def test_each_collective_of_tensor_parallelism_takes_the_cpu_some_time():
    one = sum(step(SMALL + "--precision-recipe fp8-tile").values())
    split = SMALL + "--tensor-model-parallel-size 2 --precision-recipe fp8-tile"
    reduced = sum(step(split).values())
    scattered = sum(step(split + " --sequence-parallel").values())
    # Two all-reduces; or codes and scales gathered for fprop and for wgrad, the second layer's
    # gradient gathered, and two reduce-scatters.
    assert reduced - one == pytest.approx(3 * 4 * 2 * 2 * 125e-6, rel=1e-2)
    assert scattered - one == pytest.approx(3 * 4 * 2 * 7 * 125e-6, rel=1e-2)


def test_recomputed_layers_are_launched_twice():
    words = SMALL + "--precision-recipe bf16"
    all_layers = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    more = sum(step(words + all_layers).values()) - sum(step(words).values())
    assert more == pytest.approx(3 * 4 * 2 * 1200e-6, rel=1e-3)


def test_a_wide_model_does_not_wait():
    words = "--num-layers 4 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192 "
    words += "--micro-batch-size 1 --global-batch-size 2 --bf16 --precision-recipe nvfp4"
    assert step(words)["waiting for the CPU"] == pytest.approx(10e-3)
