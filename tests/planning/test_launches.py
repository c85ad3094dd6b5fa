"""Times by hand: the CPU's of steps that a GPU does in no time, and the loss's kernels."""

import pytest
import torch
from built import parse, planned
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lowbit.kernels import loss
from megatron_lowbit.layers.cross_entropy import cross_entropy
from megatron_lowbit.planning.compute import head_times
from megatron_lowbit.planning.device import Device
from megatron_lowbit.planning.estimate import WAITING, repeated, waiting
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.model import Linear

# isort: split
from liger_kernel.megatron import LigerMegatronCrossEntropy
from liger_kernel.ops import vocab_parallel_cross_entropy as liger
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
    "--micro-batch-size 1 --global-batch-size 3 --bf16 "
)
EXPERTS = (
    SMALL + "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --precision-recipe bf16 "
)
TOKENS, VOCABULARY = 64, 512
SPARSE = {"index", "index_put_", "empty"}
"""Operations that read or write one logit a token, or none."""
FUSED = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl"


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


def estimated(words: str, gpus: int = 1):
    return planned(words, gpus, vocabulary=4096, transformer_engine=False, scan="torch")


def step(words: str, gpus: int = 1) -> float:
    return estimated(words, gpus).step


@pytest.mark.parametrize(
    ("recipe", "linear"),
    [("bf16", 0), ("fp8-tile", 2 * 312), ("nvfp4 --recipe-set bf16_blocks=none", 2 * (312 + 289))],
)
def test_a_tiny_model_takes_what_the_cpu_does(recipe, linear):
    parts = 4 * 2 * (1200 + 800 + 2 * linear)
    # But for the weights, which a GPU quantizes once a step: microseconds.
    expected = pytest.approx(1e-6 * (3 * parts + (4 * 6 + 3) * 170 + 10000), rel=1e-3)
    assert step(SMALL + f"--precision-recipe {recipe}") == expected


def test_graphs_leave_what_is_between_steps():
    recipe = "--precision-recipe nvfp4 --cuda-graph-impl local"
    waits = estimated(SMALL + recipe).seconds[WAITING]
    # Four layers of six tensors, and three around them; less what the optimizer takes the GPU.
    assert 10e-3 < waits < 1e-6 * ((4 * 6 + 3) * 170 + 10000)


def test_grouped_experts_are_launched_together():
    single, grouped = (step(EXPERTS + more) for more in ("", "--moe-grouped-gemm"))
    # Three microbatches of four layers: seven times less a part's passes, but two linear layers.
    saved = 3 * 4 * (7 * (1200 + 800) - 8 * 2 * 2 * 34)
    assert single - grouped == pytest.approx(1e-6 * saved, rel=1e-2)


def test_each_collective_of_tensor_parallelism_takes_the_cpu_some_time():
    single = step(SMALL + "--precision-recipe fp8-tile")
    split = SMALL + "--tensor-model-parallel-size 2 --precision-recipe fp8-tile"
    reduced, scattered = (step(split + more, gpus=2) for more in ("", " --sequence-parallel"))
    # Two all-reduces; or codes and scales gathered for fprop and for wgrad, the second layer's
    # gradient gathered, and two reduce-scatters.
    assert reduced - single == pytest.approx(3 * 4 * 2 * 2 * 125e-6, rel=1e-2)
    assert scattered - single == pytest.approx(3 * 4 * 2 * 7 * 125e-6, rel=1e-2)


def test_recomputed_layers_are_launched_twice():
    words = SMALL + "--precision-recipe bf16"
    all_layers = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    more = step(words + all_layers) - step(words)
    assert more == pytest.approx(3 * 4 * 2 * 1200e-6, rel=1e-3)


def test_a_wide_model_does_not_wait():
    words = "--num-layers 4 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192 "
    words += "--micro-batch-size 1 --global-batch-size 2 --bf16 --precision-recipe nvfp4"
    assert estimated(words).seconds[WAITING] == pytest.approx(10e-3)


class Traffic(TorchDispatchMode):
    """Count of the bytes that operations read and write in tensors as large as the logits."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in SPARSE:
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            self.moved += sum(x.nbytes for x in tensors if x.numel() == TOKENS * VOCABULARY)
        return result


class Launches(dict):
    """Stand-in of a Triton kernel; it counts its arguments' bytes, each a number of times."""

    def __init__(self, traffic: Traffic, times: int) -> None:
        self.traffic, self.times = traffic, times

    def __missing__(self, grid):
        def launch(*positional, **named):
            given = (*positional, *named.values())
            tensors = [x for x in given if isinstance(x, torch.Tensor)]
            large = [x.nbytes for x in tensors if x.numel() == TOKENS * VOCABULARY]
            self.traffic.moved += self.times * sum(large)

        return launch


def test_the_loss_moves_the_bytes_of_megatron_lms_operations(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    check_traffic(lambda *given: vocab_parallel_cross_entropy(*given, tp_group=object()), Traffic())


def test_the_loss_moves_the_bytes_of_liger_kernels_operations(monkeypatch):
    """The first kernel reads logits and writes exponentials; the second reads and writes those."""
    traffic = Traffic()
    for name, times in (("forward", 1), ("backward", 2)):
        kernel = f"liger_vocab_parallel_ce_{name}_kernel"
        monkeypatch.setattr(liger, kernel, Launches(traffic, times))
    check_traffic(LigerMegatronCrossEntropy(), traffic, f"{FUSED} liger")


def test_the_loss_moves_the_bytes_of_this_projects_kernels(monkeypatch):
    """The first kernel reads logits; the second one reads and writes them."""
    traffic = Traffic()
    for name, times in (("cross_entropy_kernel", 1), ("cross_entropy_gradient_kernel", 2)):
        monkeypatch.setattr(loss, name, Launches(traffic, times))
    check_traffic(lambda *given: cross_entropy(*given, None), traffic, f"{FUSED} lowbit")


def check_traffic(loss, traffic: Traffic, more: str = "") -> None:
    """Check that a plan counts the bytes of a loss, forward and backward."""
    logits = torch.randn(TOKENS, 1, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(VOCABULARY, (TOKENS, 1))
    with traffic:
        loss(logits, target).sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    model = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16"
    args = parse(f"{model} {more}")
    device = Device(gpu("h200"), accumulate=False)

    def seconds(vocabulary: int) -> float:
        times = head_times(args, Linear(args.hidden_size, vocabulary), device)
        return times.forward["elementwise"] + times.backward["elementwise"]

    more = seconds(2 * VOCABULARY) - seconds(VOCABULARY)
    assert more == pytest.approx(device.moved(traffic.moved))
