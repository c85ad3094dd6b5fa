"""Loading checkpoints in other layouts, with the optimizer's state, to the bit.

A run that loads the iteration it should end at trains nothing, and saves again in its own layout:
so checkpoints are passed on here. The vocabulary is padded alike in all layouts.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_run import LATENT, done, losses, saved_tensors, start_from

from megatron_lowbit.megatron.run.common_state import read_common_state

ITERATIONS = 2
# Histories shorter than usual.
MODEL = ("--train-iters", ITERATIONS, "--fp8-recipe", "fp8-delayed", "--recipe-set",
         "amax_history.length=4")  # fmt: skip
# Without the second argument such an optimizer's state loads only in its own layout.
DISTRIBUTED = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
OPTIMIZERS = {"plain": (), "distributed": DISTRIBUTED}

TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
TP2_SP, ETP1 = (*TP2, "--sequence-parallel"), ("--expert-tensor-parallel-size", 1)
LAYOUTS = {
    "single": (),
    "tp2": TP2,
    "tp2 sp": TP2_SP,
    "pp2": PP2,
    "pp2 interleaved": (*PP2, "--num-layers-per-virtual-pipeline-stage", 1),
    "dp2": (),
}
CHAIN = ("single", "tp2 sp", "pp2", "dp2", "pp2 interleaved", "tp2", "back")
# No recipe: FP32 throughout. Optimizer -> layouts that train on, each from what the one before
# left; two steps each, for only the second's loss depends on the moments that were loaded.
GOES_ON = {"plain": ("tp2 sp",), "distributed": ("pp2", "dp2")}
UNQUANTIZED = ("--lr", 1e-3)
# Unclipped, for a norm depends on how the buckets of gradients are cut.
OVERLAP = {"overlap": ("--overlap-grad-reduce", "--overlap-param-gather"), "no overlap": ()}
OVERLAPPED = (*UNQUANTIZED, *DISTRIBUTED, "--clip-grad", 0, "--train-iters", 2, "--save-interval",
              1)  # fmt: skip
REFUSED = "context parallel"


@pytest.fixture
def chain(pretrain_here, pretrain_ranks, tmp_path) -> Path:
    """Folder with the folders of a chain of layouts."""
    model = (*MODEL, *DISTRIBUTED)
    done(pretrain_here(*model, "--save", tmp_path / "single"))
    pretrain_ranks(
        {
            reader: passed_on(tmp_path, model, writer, reader, LAYOUTS[reader])
            for writer, reader in pairwise(CHAIN[:-1])
        }
    )
    done(pretrain_here(*passed_on(tmp_path, model, CHAIN[-2], "back", LAYOUTS["single"])))
    return tmp_path


@pytest.fixture
def runs(memory, pretrain_here, pretrain_ranks, tmp_path) -> Path:
    """Folder with the folders of all other runs."""
    if memory:
        return memory["folder"]
    jobs = {}
    for optimizer, layouts in GOES_ON.items():
        model, source = (*UNQUANTIZED, *OPTIMIZERS[optimizer]), tmp_path / f"{optimizer} single"
        steps = 2 * len(layouts) + 2
        done(pretrain_here(*model, "--train-iters", steps, "--save-interval", 2, "--save", source))
        source = start_from(source, 2, tmp_path / f"{optimizer} start")
        for last, name in zip(range(4, steps + 1, 2), layouts, strict=True):
            save = tmp_path / f"{optimizer} {name}"
            jobs[save.name] = (*model, *LAYOUTS[name], "--train-iters", last, "--load", source,
                               "--save", save)  # fmt: skip
            source = save
    for name, arguments in OVERLAP.items():
        jobs[name] = (*OVERLAPPED, *arguments, "--save", tmp_path / name)
    jobs["latent"] = (*MODEL, *LATENT, *PP2, "--num-layers", 2, "--train-iters", 1,
                      "--save", tmp_path / "latent")  # fmt: skip
    jobs[REFUSED] = ("--train-iters", 1, "--context-parallel-size", 2)
    memory["refused"] = pretrain_ranks(jobs, refused=(REFUSED,))
    memory["folder"] = tmp_path
    return tmp_path


def passed_on(folder: Path, model: tuple, source: str, name: str, layout: tuple) -> tuple:
    """Return arguments of a run that loads folder ``source`` and saves ``name``."""
    return (*model, *layout, "--load", folder / source, "--save", folder / name)


def content(folder: Path, iteration: int = ITERATIONS) -> dict[str, torch.Tensor]:
    return saved_tensors(folder / f"iter_{iteration:07d}")


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys of tensors with different bits in two checkpoints."""
    return [
        key
        for key in sorted(one.keys() | other.keys())
        if key not in one or key not in other or not torch.equal(one[key], other[key])
    ]


@pytest.mark.slow
def test_a_chain_of_layouts_ends_with_what_it_began(chain):
    first = content(chain / "single")
    for kind in ("embedding.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.",
                 "amax_history.decoder.layers.3."):  # fmt: skip
        values = [tensor for key, tensor in first.items() if key.startswith(kind)]
        assert values and all(tensor.any() for tensor in values), kind
    schedule = read_common_state(chain / "single" / "iter_0000002")["opt_param_scheduler"]
    for name in CHAIN[1:]:
        assert differences(first, content(chain / name)) == [], name
        common = read_common_state(chain / name / "iter_0000002")
        assert common["iteration"] == ITERATIONS
        assert common["opt_param_scheduler"]["num_steps"] == schedule["num_steps"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_in_other_layouts(runs, optimizer):
    whole = losses(runs / f"{optimizer} single")
    for number, name in enumerate(GOES_ON[optimizer]):
        first = 3 + 2 * number
        expected = {step: whole[step] for step in (first, first + 1)}
        assert losses(runs / f"{optimizer} {name}") == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_a_checkpoint_does_not_depend_on_overlapped_communication(runs):
    """Each rank would save old parameters of the other rank without a gather before it.

    No evaluation, which gathers too, comes before the first of these.
    """
    for iteration in (1, 2):
        one, other = (content(runs / name, iteration) for name in OVERLAP)
        assert differences(one, other) == []


@pytest.mark.slow
def test_latent_attention_trains_in_a_pipeline(runs):
    assert losses(runs / "latent").keys() == {1}


@pytest.mark.slow
def test_context_parallelism_is_refused_in_one_line(runs, memory):
    for rank in range(2):
        message = (memory["refused"] / f"{REFUSED}.{rank}.error").read_text()
        assert message.startswith("--context-parallel-size 2 with --transformer-impl local: ")
        assert "\n" not in message


# One optimizer, or separate ones for dense layers and experts.
EXPERTS = ("--num-layers", 2, "--num-experts", 4, "--moe-ffn-hidden-size", 64)
EP2 = ("--expert-model-parallel-size", 2)
EXPERT_LAYOUTS = {"one": (), "ep2": EP2, "tp2": TP2_SP, "tp2 ep2": (*TP2_SP, *EP2, *ETP1),
                  "back": ()}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_experts_are_spread_and_gathered(pretrain_here, pretrain_ranks, tmp_path, optimizer):
    model = (*EXPERTS, *MODEL, *OPTIMIZERS[optimizer])
    jobs = {
        reader: passed_on(tmp_path, model, writer, reader, EXPERT_LAYOUTS[reader])
        for writer, reader in pairwise(EXPERT_LAYOUTS)
    }
    done(pretrain_here(*model, "--save", tmp_path / "one"))
    back = jobs.pop("back")
    pretrain_ranks(jobs)
    done(pretrain_here(*back))
    one = content(tmp_path / "one")
    assert any("exp_avg.decoder.layers.mlp.experts" in key for key in one)
    for name in (*jobs, "back"):
        assert differences(one, content(tmp_path / name)) == [], name


@pytest.mark.slow
def test_the_layout_of_an_optimizer_that_is_not_reshardable(pretrain_ranks, tmp_path):
    model = (*EXPERTS, "--train-iters", 1, "--use-distributed-optimizer")
    layouts = {"tp2": TP2_SP, "ep2": EP2}
    one = (*model, "--save", tmp_path / "one")
    others = {name: (*model, *layout, "--load", tmp_path / "one") for name, layout in
              layouts.items()}  # fmt: skip
    folder = pretrain_ranks({"one": one, **others}, refused=tuple(others))
    sizes = ("--tensor-model-parallel-size", "--expert-model-parallel-size")
    for name, size in zip(layouts, sizes, strict=True):
        error = (folder / f"{name}.0.error").read_text()
        assert f"only in its own layout: this run has {size} 2 instead of 1" in error
        assert "; --dist-ckpt-optim-fully-reshardable saves" in error


# Padded to 560 on one rank, 640 on two.
VOCABULARY = 512
PADDED = ("--num-layers", 1, "--make-vocab-size-divisible-by", 80, "--train-iters", 2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_padding_of_the_vocabulary_may_differ(pretrain_here, pretrain_ranks, tmp_path, optimizer):
    model = (*PADDED, *OPTIMIZERS[optimizer])
    done(pretrain_here(*model, "--save", tmp_path / "one"))
    pretrain_ranks({"two": passed_on(tmp_path, model, "one", "two", TP2)})
    done(pretrain_here(*passed_on(tmp_path, model, "two", "back", ())))
    one, two, back = (content(tmp_path / name) for name in ("one", "two", "back"))
    assert one.keys() == two.keys() == back.keys()
    padded = 0
    for key, tensor in one.items():
        if not ("word_embeddings" in key or "output_layer" in key):
            assert torch.equal(tensor, two[key])
            assert torch.equal(tensor, back[key])
            continue
        padded += 1
        assert (len(tensor), len(two[key]), len(back[key])) == (560, 640, 560)
        for other in (two[key], back[key]):
            assert torch.equal(other[:VOCABULARY], tensor[:VOCABULARY])
    # Two matrices, each with two moments; the distributed optimizer keeps FP32 copies too.
    assert padded in (6, 8)
