"""A product that is not finite in a run: computed again in BF16, and counted."""

from pathlib import Path

import pytest
import torch
from tiny_run import HYBRID, ONE_MICROBATCH, done, metrics

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.megatron import recipe_hook
from megatron_lowbit.megatron.features.logs import FALLBACKS
from megatron_lowbit.megatron.layers.state import LayerState

RUN = ("--fp8-recipe", "fp8-tile", "--train-iters", 4, "--log-interval", 2)
GUARDED = ("--recipe-set", "fallback=bf16")
GEMMS = ("fprop", "dgrad", "wgrad")


def fprop_counts(folder: Path) -> list[int]:
    """Return the counts of fprop in a run's metrics.jsonl."""
    name = f"{FALLBACKS}/fprop"
    return [m[name] for m in metrics(folder) if name in m]


class Breaking(ReferenceEngine):
    """Engine some of whose products, by their number in the run, are NaN: without numbers all."""

    def __init__(self, *broken):
        super().__init__("tests")
        self.broken, self.products = broken, iter(range(10**9))

    def gemm(self, *operands):
        y = super().gemm(*operands)
        return y * torch.nan if not self.broken or next(self.products) in self.broken else y


@pytest.mark.slow
def test_counted(pretrain_here, monkeypatch, tmp_path):
    """The first product is fprop's of the first layer that is quantized."""
    monkeypatch.setattr(recipe_hook, "select_engine", lambda *_: Breaking(0, 1))
    result = pretrain_here(*RUN, *GUARDED, "--save", tmp_path)
    done(result)
    told = [line for line in result.stdout.splitlines() if "computed again in BF16" in line]
    assert [line.split(":")[0] for line in told] == ["rank 0, iteration 2"] * len(told)
    assert all(" fprop: 1 products" in line for line in told) and len(told) == 2
    found = [[m.get(f"bf16_fallbacks/{gemm}") for gemm in GEMMS] for m in metrics(tmp_path)]
    assert [counts for counts in found if counts != [None] * 3] == [[2, 0, 0], [0, 0, 0]]
    assert all(m["lm_loss"] is not None for m in metrics(tmp_path) if "lm_loss" in m)


@pytest.mark.slow
def test_a_hybrids_mixers_fall_back(pretrain_here, monkeypatch, tmp_path):
    """All products are broken: the run is that in high precision, to the digit."""
    runs = {}
    for name in ("bf16", "broken"):
        more = ("--precision-recipe", "bf16")
        if name == "broken":
            monkeypatch.setattr(recipe_hook, "select_engine", lambda *_: Breaking())
            more = ("--precision-recipe", "fp8-tile", *GUARDED)
        save = tmp_path / name
        done(pretrain_here(*HYBRID, *more, *ONE_MICROBATCH, "--train-iters", 2, "--save", save))
        runs[name] = metrics(save)
    losses = {name: [m["lm_loss"] for m in run if "lm_loss" in m] for name, run in runs.items()}
    assert losses["bf16"] == losses["broken"]
    assert all(runs["broken"][-1][f"bf16_fallbacks/{gemm}"] > 0 for gemm in GEMMS)


@pytest.fixture
def guarded(tmp_path):
    """A recipe file whose products fall back, in layers whose paths match a pattern."""

    def write(pattern: str) -> Path:
        path = tmp_path / "guarded.yaml"
        text = Path("recipes/fp8-tile.yaml").read_text()
        text = text.replace("  fp8:", "  fp8:\n    fallback: bf16")
        path.write_text(text.replace('pattern: "*"', f'pattern: "{pattern}"'))
        return path

    return write


def test_counted_from_a_switch_on(pretrain_here, monkeypatch, guarded, tmp_path):
    monkeypatch.setattr(recipe_hook, "select_engine", lambda *_: Breaking())
    switch = f"switches.guard={{iteration: 2, to: {guarded('*')}}}"
    run = ("--precision-recipe", "bf16", "--recipe-set", switch, "--train-iters", 4)
    done(pretrain_here(*run, *ONE_MICROBATCH, "--log-interval", 2, "--save", tmp_path / "run"))
    before, after = fprop_counts(tmp_path / "run")
    assert before == 0 and after > 0


def test_a_rank_without_fallbacks_takes_part_in_the_count(
    pretrain_here, monkeypatch, guarded, tmp_path
):
    """The other ranks wait for its part of the sum."""
    set_precision = LayerState.set_precision

    def without(state, precision):
        set_precision(state, precision)
        state.fallbacks = None

    monkeypatch.setattr(LayerState, "set_precision", without)
    run = ("--precision-recipe", guarded("*"), "--train-iters", 1, "--save", tmp_path / "run")
    done(pretrain_here(*run))
    assert fprop_counts(tmp_path / "run") == [0]


@pytest.mark.slow
def test_counted_where_one_stage_has_no_fallback(pretrain_ranks, guarded, tmp_path):
    """The first of two pipeline stages is in BF16 throughout."""
    save, layers = tmp_path / "run", guarded("decoder.layers.1.*")
    pp2 = ("--pipeline-model-parallel-size", 2, "--num-layers", 2, "--train-iters", 1)
    pretrain_ranks({"pp2": (*pp2, "--precision-recipe", layers, "--save", save)})
    assert fprop_counts(save) == [0]
