"""Mixture of experts: expert parallelism compared with one process, and refusals."""

from pathlib import Path

import pytest
import torch
from tiny_run import OTHER_RECIPE, check_same_tensors, done, saved_histories, start_from, steps

from megatron_lowbit.megatron.layers.experts import GroupedLinear

EXPERTS = ("--num-layers", 2, "--num-experts", 4, "--moe-ffn-hidden-size", 64,
           "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff",
           0.01)  # fmt: skip
NVFP4 = ("--fp4-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none")
GROUP = ("--recipe-set", "tensor_scale=group")
SPLIT = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
GROUPED = ("--moe-grouped-gemm",)
DELAYED = ("--fp8-recipe", "fp8-delayed")

# Relative bounds of the first step's loss and gradient norm after a common checkpoint: two ranks
# with two experts each against two ranks with all four. Routing drops no token, so high precision
# differs by the order of FP32 sums. An expert of the first layout sees the tokens of both ranks at
# once: tensor scales, wgrad's blocks along tokens and its random bits are then others, which is
# noise of the size that quantization has against high precision anyway. Where the forward pass is
# not quantized the loss is the same.
PARITY = {
    "high precision": (("--precision-recipe", "bf16"), 1e-5, 1e-5),
    "nvfp4": (NVFP4, 1e-4, 1e-2),
    # Over eight random keys the layouts' norms differ by 1.3e-2 (root mean square), unbiased, and
    # those of one layout vary by 2.5e-2 (standard deviation): the draws of stochastic rounding.
    "mxfp4-backward": (("--fp4-recipe", "mxfp4-backward"), 1e-5, 3e-2),
    "delayed": (DELAYED, 1e-4, 1e-2),
}
ALONE, SPREAD = (("--expert-model-parallel-size", size) for size in (1, 2))
LAYOUTS = {"1": ALONE, "2": SPREAD, "2 grouped": (*SPREAD, *GROUPED), "tensor parallel": SPLIT}
TENSOR_PARALLEL = (*NVFP4, *GROUP)
RECIPES = {name: options for name, (options, *_) in PARITY.items()} | {"group": TENSOR_PARALLEL}
# A job of all runs of make test, and one of the others.
QUICK = {"high precision": ("2",), "nvfp4": ("1", "2", "2 grouped"), "delayed": ("1", "2"),
         "group": ("tensor parallel",)}  # fmt: skip
OTHERS = {"high precision": ("1", "2", "2 grouped"), "mxfp4-backward": ("1", "2", "2 grouped"),
          "delayed": ("2", "2 grouped")}  # fmt: skip
JOBS = {False: QUICK, True: OTHERS}


@pytest.fixture
def start(memory, pretrain_here, tmp_path_factory):
    """Folder of the common checkpoint."""
    if "start" not in memory:
        memory["start"] = tmp_path_factory.mktemp("start")
        done(pretrain_here(*EXPERTS, "--train-iters", 2, "--save", memory["start"]))
    return memory["start"]


@pytest.fixture
def runs(memory, start, pretrain_ranks, tmp_path):
    """Function that makes the runs of make test, or the others, once.

    It returns (folder of the runs' folders ``RECIPE LAYOUT``, folder of the ranks' histories).
    """

    def make(slow: bool = False) -> tuple[Path, Path]:
        if slow not in memory:
            jobs = {}
            for recipe, layout in [
                (name, each) for name in JOBS[slow] for each in JOBS[slow][name]
            ]:
                save = start_from(start, 2, tmp_path / f"{recipe} {layout}")
                jobs[save.name] = (
                    *EXPERTS, *RECIPES[recipe], *LAYOUTS[layout], "--load", save, "--save", save,
                    "--train-iters", 3 + (recipe == "delayed"), "--save-interval", 1, *OTHER_RECIPE,
                )  # fmt: skip
            memory[slow] = (tmp_path, pretrain_ranks(jobs))
        return memory[slow]

    return make


def recipes_of(layout: str) -> list:
    """Return (recipe, slow) of all recipes; the quick job has the layout of the others."""
    return [
        pytest.param(name, slow, marks=[pytest.mark.slow] * slow, id=name)
        for name in PARITY
        for slow in [layout not in QUICK.get(name, ())]
    ]


@pytest.mark.parametrize(("name", "slow"), recipes_of("1"))
def test_expert_parallelism_agrees(runs, name, slow):
    _, loss_bound, norm_bound = PARITY[name]
    folder, _ = runs(slow)
    (one_loss, one_norm), (loss, norm) = (steps(folder / f"{name} {ep}")[3] for ep in (1, 2))
    assert loss == pytest.approx(one_loss, rel=loss_bound)
    assert norm == pytest.approx(one_norm, rel=norm_bound)


@pytest.mark.parametrize(("name", "slow"), recipes_of("2 grouped"))
def test_grouped_experts_are_the_same(runs, name, slow):
    """Compare losses, and all tensors of the checkpoint, to the bit; norms add in another order."""
    folders = [runs(slow)[0] / f"{name} {layout}" for layout in ("2", "2 grouped")]
    one, grouped = map(steps, folders)
    assert one.keys() == grouped.keys()
    for step, (loss, norm) in one.items():
        assert grouped[step] == (loss, pytest.approx(norm, rel=1e-6))
    check_same_tensors(*folders, 3)


@pytest.mark.parametrize("recipe", [NVFP4, ("--precision-recipe", "bf16")], ids=["nvfp4", "bf16"])
def test_experts_are_grouped(recipe, pretrain_here, monkeypatch):
    """The tests above would also pass if the argument had no effect."""
    calls, forward = [], GroupedLinear.forward

    def count(self, *arguments):
        calls.append(len(self))
        return forward(self, *arguments)

    monkeypatch.setattr(GroupedLinear, "forward", count)
    done(pretrain_here(*EXPERTS, *GROUPED, *recipe, "--train-iters", 1))
    microbatches, layers = 2, 2
    assert calls == [4] * microbatches * layers * 2  # fc1 and fc2


def test_tensor_parallelism_agrees(runs, start, pretrain_here, tmp_path):
    """Ranks share the group's scales, so that tokens are quantized to the same bits."""
    folder, _ = runs()
    load = start_from(start, 2, tmp_path / "one")
    command = (*EXPERTS, *TENSOR_PARALLEL, *OTHER_RECIPE, "--train-iters", 3, "--load", load)
    done(pretrain_here(*command, "--save", load))
    one, split = (steps(path)[3] for path in (load, folder / "group tensor parallel"))
    assert split[0] == pytest.approx(one[0], rel=1e-5)
    assert split[1] == pytest.approx(one[1], rel=1e-4)


def test_experts_are_quantized(runs):
    """The tests above would also pass if they were not."""
    folder, _ = runs()
    plain, quantized = (steps(folder / f"{name} 2")[3] for name in ("high precision", "nvfp4"))
    assert quantized[0] != pytest.approx(plain[0], rel=1e-7)


@pytest.mark.slow
def test_experts_gradients_are_quantized(runs):
    folder, _ = runs(slow=True)
    plain, quantized = (
        steps(folder / f"{name} 2")[3] for name in ("high precision", "mxfp4-backward")
    )
    assert quantized[1] != pytest.approx(plain[1], rel=1e-4)


def test_histories_belong_to_global_experts(runs):
    folder, recorded = runs()
    saved = saved_histories(folder / "delayed 2" / "iter_0000003")
    paths = {
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc{fc}"
        for layer in range(2)
        for expert in range(4)
        for fc in (1, 2)
    }
    assert paths == {path for path in saved if "experts" in path}
    for rank in range(2):
        mine = torch.load(recorded / f"delayed 2.{rank}.pt")[3]
        held = {int(path.split(".")[6]) for path in mine if "experts" in path}
        assert held == {2 * rank, 2 * rank + 1}
        for path, entries in mine.items():
            assert torch.equal(entries, saved[path])
    # Weights' amaxes of this step do not depend on tokens, nor on who holds the expert.
    other = saved_histories(folder / "delayed 1" / "iter_0000003")
    fprop_weight = 1
    for path in paths:
        assert torch.equal(saved[path][fprop_weight], other[path][fprop_weight])


@pytest.mark.slow
def test_tokens_sent_as_codes_train_alike(pretrain_ranks, tmp_path):
    """The runs agree to the bit; blocks in BF16 send BF16."""
    common = (
        *EXPERTS, *SPREAD, *GROUPED, "--moe-token-dispatcher-type", "alltoall",
        "--precision-recipe", "fp8-tile-e4m3", "--recipe-set", "wgrad.input.requantize=true",
        "--recipe-set", "matchers.bf16_blocks.last=0", "--train-iters", 3, "--save-interval", 3,
    )  # fmt: skip
    flags = {"tokens": (), "codes": ("--quantized-expert-dispatch",)}
    jobs = {name: (*common, *flag, "--save", tmp_path / name) for name, flag in flags.items()}
    other = (*common, *flags["codes"], "--recipe-set", "wgrad.input.requantize=false")
    pretrain_ranks(jobs | {"other": other}, refused=("other",))
    assert steps(tmp_path / "codes") == steps(tmp_path / "tokens")
    check_same_tensors(tmp_path / "codes", tmp_path / "tokens", 3)


def test_experts_without_tokens(pretrain_here, tmp_path):
    """A microbatch has 32 tokens for 40 experts, some of which get none."""
    many = ("--num-layers", 1, "--num-experts", 40, "--moe-ffn-hidden-size", 32,
            "--moe-router-topk", 1, "--moe-router-pre-softmax", "--micro-batch-size", 1,
            "--global-batch-size", 1, "--train-iters", 2, "--save", tmp_path)  # fmt: skip
    done(pretrain_here(*many, *DELAYED))
    assert all(torch.isfinite(torch.tensor(step)).all() for step in steps(tmp_path).values())
    histories = saved_histories(tmp_path / "iter_0000002")
    known = [(history >= 0).any() for path, history in histories.items() if "experts" in path]
    assert any(known)
    assert not all(known)
