"""The table of what quantization-aware training gains."""

import json

import fine_tuning
import pytest


def test_differences_are_paired_by_seed():
    losses = {("a", 1): 1.5, ("a", 2): 2.5, ("b", 1): 1.0, ("b", 2): 2.2}
    assert fine_tuning.difference(losses, "a", "b") == "+0.4000 ± 0.1000"  # of 0.5 and 0.3


def test_the_page_says_what_is_kept():
    kept = json.loads(fine_tuning.KEPT.read_text())
    assert fine_tuning.section_of(kept) in fine_tuning.PAGE.read_text()


@pytest.mark.parametrize("format", fine_tuning.FORMATS)
def test_training_loses_less_in_every_seed(format):
    """The statement of the page above its table."""
    kept = json.loads(fine_tuning.KEPT.read_text())
    losses = {(run["name"], run["seed"]): run["validation_loss"] for run in kept}
    gaps = [losses[f"{format} {fine_tuning.DURING}", seed]
            - losses[f"{format} {fine_tuning.AFTER}", seed] for seed in range(1, 5)]  # fmt: skip
    assert max(gaps) < 0
