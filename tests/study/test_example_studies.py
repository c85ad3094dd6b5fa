"""The studies of examples/: every run's arguments and recipes are in order."""

from pathlib import Path

import pytest

from megatron_lowbit.megatron.arguments import parse_arguments
from megatron_lowbit.recipes import load_recipes
from megatron_lowbit.study.definition import jobs_of, read_study

# isort: split
from megatron.training.training import destroy_global_state

ROOT = Path(__file__).parents[2]
DATA = ["--data-path", "x", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4095"]
STUDIES = sorted((ROOT / "examples" / "studies").glob("*.yaml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_arguments_and_recipes(file, monkeypatch):
    """All differ, in what they make of a layer or in their other arguments."""
    monkeypatch.chdir(ROOT)
    study = read_study(file)
    jobs = jobs_of(study.model_copy(update={"seeds": study.seeds[:1]}), Path("runs"), DATA)
    found = []
    for job in jobs:
        args = parse_arguments(job.command[4:])
        destroy_global_state()
        recipe = load_recipes(args.precision_recipe, args.recipe_set)
        own = (args.mxnorm, args.mxnorm_p, args.train_iters, args.lr, job.start)
        found.append((*own, recipe))
    assert len(found) > 2
    for number, one in enumerate(found):
        assert one not in found[:number]
