"""The studies of examples/: every run's arguments and recipes are in order."""

from pathlib import Path

import pytest

from megatron_lowbit.analysis.study import jobs_of, read_study
from megatron_lowbit.recipes import load_recipes
from megatron_lowbit.training.arguments import parse_arguments

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "examples" / "studies").glob("*.yaml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_arguments_and_recipes(file, monkeypatch):
    """All differ, in what they make of a layer or in their other arguments."""
    monkeypatch.chdir(ROOT)
    jobs = jobs_of(read_study(file), Path("runs"), ["--data-path", "x", "--tokenizer-model", "y"])
    found = []
    for job in jobs:
        args = parse_arguments(job.command[2:])
        recipe = load_recipes(args.recipes, args.recipe_set)
        found.append((args.seed, args.normalization, args.mxnorm_p, recipe))
    assert len(STUDIES) == 6
    for number, one in enumerate(found):
        assert one not in found[:number]
