"""The studies of examples/: every run's arguments and recipes are in order."""

import shlex
from pathlib import Path

import pytest

from megatron_lowbit.arguments import compatibility, parse_arguments
from megatron_lowbit.arguments.precision import Machine
from megatron_lowbit.arguments.rows import refuse
from megatron_lowbit.recipes import load_recipes
from megatron_lowbit.recipes.show import model_layers
from megatron_lowbit.study.definition import jobs_of, read_study

# isort: split
from megatron.training.training import destroy_global_state

from tests.marks import others_slow

ROOT = Path(__file__).parents[2]
DATA = ["--data-path", "x", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4095"]
STUDIES = sorted(file.stem for file in (ROOT / "examples" / "studies").glob("*.yaml"))


@pytest.mark.parametrize("name", others_slow(STUDIES, ("leaderboard", "nvfp4-blocks")))
def test_arguments_and_recipes(name, monkeypatch):
    """All differ, in what they make of a layer or in their other arguments; as on an H100."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Machine, "current", lambda: Machine((9, 0), transformer_engine=True))
    study = read_study(ROOT / "examples" / "studies" / f"{name}.yaml")
    jobs = jobs_of(study.model_copy(update={"seeds": study.seeds[:1]}), Path("runs"), DATA)
    runs = []
    for job in jobs:
        args = parse_arguments(job.command[4:])
        destroy_global_state()
        recipe = load_recipes(args.precision_recipe, args.recipe_set)
        refuse(compatibility.cuda_graphs(args, recipe))
        others = (
            args.mxnorm,
            args.mxnorm_p,
            args.train_iters,
            args.lr,
            args.distill_from,
            job.start,
        )
        runs.append((*others, recipe))
    assert len(runs) > 2
    for number, run in enumerate(runs):
        assert run not in runs[:number]


def test_local_layers_run_without_apex():
    studies = [read_study(ROOT / "examples" / "studies" / f"{name}.yaml") for name in STUDIES]
    local = [one.arguments for one in studies if "--transformer-impl local" in one.arguments]
    assert len(local) > 2
    for arguments in local:
        assert {"--no-persist-layer-norm", "--no-masked-softmax-fusion"} <= set(arguments.split())


def test_methods_of_the_leaderboard_quantize_every_layer():
    """The model has 60M parameters and 100M tokens."""
    folder = ROOT / "examples" / "studies"
    study, more = (read_study(folder / f"{n}.yaml") for n in ("leaderboard", "leaderboard-more"))
    assert (study.arguments, study.seeds) == (more.arguments, more.seeds)
    layers, quantized = model_layers(None, 10), {}
    branches = [*study.branches.values(), *more.branches.values()]
    parts = study.runs, more.runs, *(branch.runs for branch in branches)
    for name, arguments in (pair for part in parts for pair in part.items()):
        words = shlex.split(arguments)
        assert words[0] == "--precision-recipe" and set(words[2::2]) <= {"--recipe-set"}
        recipe = load_recipes(words[1:2], words[3::2])
        quantized[name] = sum(recipe.precision_for(layer).quantized for layer in layers)
    assert quantized.pop("bf16") == 0
    assert len(quantized) == 31 and set(quantized.values()) == {len(layers)}
    words = shlex.split((ROOT / "examples" / "gpt-60m.args").read_text(), comments=True)
    width, inner, depth, length, batch, steps = (
        int(words[words.index(flag) + 1])
        for flag in ("--hidden-size", "--ffn-hidden-size", "--num-layers", "--seq-length",
                     "--global-batch-size", "--train-iters")
    )  # fmt: skip
    assert depth * (4 * width**2 + 3 * width * inner) + 2 * 8192 * width > 60e6
    assert steps * batch * length > 100e6
