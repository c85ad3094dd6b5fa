"""CPU runtime: torch as megatron sees it, random states, recomputation."""

import subprocess
import sys

import pytest
import torch

from megatron_lowbit.cpu_runtime.megatron_patches import with_own_generator, with_seed
from megatron_lowbit.megatron.run.steps import set_microbatch_key

# isort: split
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import get_default_causal_mask
from megatron.training import training

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces CUDA where it is absent"),
    pytest.mark.usefixtures("single_process"),
]


def called_from(module: str, code: str) -> object:
    """Return the value of an expression, evaluated in the name of ``module``."""
    return eval(code, {"__name__": module, "torch": torch})


@pytest.mark.parametrize(
    "creation",
    [
        "torch.zeros(3, device='cuda')",
        "torch.tensor([1.0], device=torch.device('cuda'))",
        "torch.zeros_like(torch.ones(2), device='cuda:0')",
        "torch.arange(3, device='cuda')",
    ],
)
def test_only_megatron_gets_the_cpu_for_cuda(creation):
    assert called_from("megatron.core.some", creation).device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        called_from("__main__", creation)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "FloatTensor"), (torch.bfloat16, "BFloat16Tensor")]
)
def test_only_megatrons_optimizers_see_cuda_types(dtype, name):
    scope = {"__name__": "megatron.core.optimizer.optimizer", "x": torch.zeros(1, dtype=dtype)}
    assert eval("x.type()", scope) == f"torch.cuda.{name}"
    assert eval("x.type('torch.HalfTensor').dtype", scope) == torch.float16
    for module in ("megatron.core.transformer.module", "user"):
        assert eval("x.type()", {**scope, "__name__": module}) == f"torch.{name}"


def test_overlapped_experts_may_be_in_fp32_but_meet_the_other_conditions():
    layer = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_moe_experts": 2}
    overlapped = {**layer, "overlap_moe_expert_parallel_comm": True,
                  "moe_token_dispatcher_type": "alltoall"}  # fmt: skip
    assert TransformerConfig(**overlapped, expert_model_parallel_size=2).bf16 is False
    with pytest.raises(AssertionError, match="only supported with expert model parallelism"):
        TransformerConfig(**overlapped)


def test_factories_keep_their_other_arguments():
    created = torch.full((2, 3), 7, dtype=torch.int16, device="cpu")
    assert created.dtype == torch.int16 and created.tolist() == [[7] * 3] * 2
    assert torch.tensor([1.0], requires_grad=True).requires_grad
    assert get_default_causal_mask(2).tolist() == [[False, True], [False, False]]


def test_moving_to_cuda_changes_nothing():
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert tensor.cuda() is tensor and tensor.cuda(non_blocking=True) is tensor
    assert module.cuda() is module
    assert torch.cuda.current_device() == torch.device("cpu")
    torch.cuda.synchronize()


def test_import_after_megatron_is_refused():
    before = "import sys, types\nsys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
    code = f"{before}import megatron_lowbit.megatron\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "megatron.core was imported too early" in done.stderr


def draw_in(name: str) -> float:
    with tensor_parallel.get_cuda_rng_tracker().fork(name):
        return torch.rand(()).item()


def test_tracker_keeps_named_states_apart():
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    outside = torch.get_rng_state()
    first, expert = draw_in("model-parallel-rng"), draw_in("expert-parallel-rng")
    second = draw_in("model-parallel-rng")
    assert torch.equal(torch.get_rng_state(), outside)
    assert len({first, second, expert}) == 3
    own = torch.Generator().manual_seed(11 + 2718)
    assert [torch.rand((), generator=own).item() for _ in range(2)] == [first, second]
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(11))
    with pytest.raises(KeyError):
        draw_in("unknown")


def test_initial_seed_is_the_callers_inside_a_named_state():
    """The CPU generator's seed is the microbatch's key, also while megatron draws for dropout."""
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    for key in (5, 2**63 - 1):
        torch.default_generator.manual_seed(key)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            torch.rand(())
            assert torch.initial_seed() == key
        assert torch.initial_seed() == key


def test_tensor_parallel_ranks_draw_apart_inside_and_alike_outside():
    drawn = []
    for rank in range(2):
        tensor_parallel.model_parallel_cuda_manual_seed(11, tp_rank=rank)
        drawn.append((torch.rand(()).item(), draw_in("model-parallel-rng")))
    assert drawn[0][0] == drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


def test_forks_nest():
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    flat = [draw_in("model-parallel-rng") for _ in range(2)]
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    with tracker.fork("model-parallel-rng"):
        nested = [torch.rand(()).item()]
        draw_in("expert-parallel-rng")
        nested.append(torch.rand(()).item())
    assert nested == flat


@pytest.mark.parametrize("key", [0, 1, 2**62 + 12345, 2**63 - 1])
def test_recomputation_replays_the_forwards_key(key):
    """Forward and its recomputation in backward must see the same ``torch.initial_seed()``."""
    seen = []

    def layer(x):
        seen.append((torch.initial_seed(), torch.rand(()).item(), draw_in("model-parallel-rng")))
        return torch.nn.functional.dropout(x, 0.5) * 2

    x = torch.ones(64, requires_grad=True)
    torch.default_generator.manual_seed(key)
    y = tensor_parallel.checkpoint(layer, False, x)
    torch.default_generator.manual_seed(99)
    draw_in("model-parallel-rng")
    y.sum().backward()
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0][0] == key
    assert torch.initial_seed() == 99
    assert torch.equal(x.grad, y.detach())
    assert 0 < (y == 0).sum() < 64


def test_the_microbatchs_key_is_what_recomputation_replays():
    seen = []

    def layer(x):
        seen.append(torch.initial_seed())
        return x * 2

    outputs = []
    for microbatch in range(2):
        set_microbatch_key(5, 7, microbatch)
        x = torch.ones(2, requires_grad=True)
        outputs.append(tensor_parallel.checkpoint(layer, False, x))
    for output in outputs:
        output.sum().backward()
    assert seen[2:] == seen[:2] and seen[0] != seen[1]


@pytest.mark.slow
def test_models_import_without_triton():
    """Torch's CPU wheels lack Triton, which megatron's Mamba mixer imports."""
    code = "import sys; sys.modules['triton'] = None; import megatron_lowbit.megatron.pretrain; "
    code += "import megatron_lowbit.megatron.layers.hybrid, megatron_lowbit.megatron.recipe_hook"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    ("question", "module", "answer"),
    [
        ("torch.cuda.is_available()", "megatron.training.initialize", True),
        ("torch.cuda.device_count()", "megatron.training.initialize", 1),
        ("torch.cuda.is_initialized()", "megatron.core.some", True),
        ("torch.cuda.get_device_capability()", "megatron.core.some", (8, 0)),
        ("torch.cuda.get_device_properties(0).major", "megatron.core.some", 0),
    ],
)
def test_only_megatron_finds_a_device(question, module, answer):
    """Torch's compiler calls some of these functions, and must get the actual results."""
    assert called_from(module, question) == answer
    if "get_device" in question:
        with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
            called_from("torch._inductor.some", question)
    else:
        assert not called_from("torch._inductor.some", question)


def test_what_timers_and_memory_reports_ask():
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    end.synchronize()
    assert end.query() and torch.cuda.current_stream().record_event() is not None
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0


def test_data_loaders_do_not_change_the_shared_generator():
    """Megatron-LM starts a new iteration over its loaders when a run is resumed."""
    assert training.build_pretraining_data_loader.__wrapped__(None, 0) is None
    assert training.build_pretraining_data_loader(None, 0) is None
    build = with_own_generator(lambda: torch.utils.data.DataLoader([1, 2, 3]))
    before = torch.get_rng_state()
    assert [int(batch) for batch in build()] == [1, 2, 3]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_a_device_context_knows_the_factories():
    """Transformers builds models in such a context, which may be the first in the process.

    Only torch is imported before, and megatron after.
    """
    code = """
import torch, megatron_lowbit.megatron, megatron.core.models.gpt
with torch.device("meta"):
    print(torch.empty(2).device, torch.arange(2).device)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.stdout.split()[-2:] == ["meta", "meta"], done.stderr[-2000:]


# -- seed and draws in the state of torch's CPU generator -----------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("drawn", [0, 1, 1000])
def test_another_seed_and_the_same_draws(seed, drawn):
    torch.manual_seed(3)
    torch.rand(drawn)
    state = torch.get_rng_state()
    changed = with_seed(state, seed)
    assert torch.equal(state, torch.get_rng_state()) and torch.initial_seed() == 3
    assert torch.equal(with_seed(changed, 3), state)
    expected = torch.rand(700), torch.randn(3), torch.randint(9, (5,))
    torch.set_rng_state(changed)
    # torch reads it as a signed number.
    assert torch.initial_seed() % 2**64 == seed
    drawn_again = torch.rand(700), torch.randn(3), torch.randint(9, (5,))
    torch.testing.assert_close(drawn_again, expected, rtol=0, atol=0)
