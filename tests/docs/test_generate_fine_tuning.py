"""The tables of quantization-aware training and distillation."""

import fine_tuning
import pytest


def test_differences_are_paired_by_seed():
    losses = {("a", 1): 1.5, ("a", 2): 2.5, ("b", 1): 1.0, ("b", 2): 2.2}
    assert fine_tuning.difference(losses, "a", "b") == "+0.4000 ± 0.1000"  # of 0.5 and 0.3


@pytest.mark.parametrize("study", fine_tuning.STUDIES)
def test_the_page_says_what_is_kept(study):
    page, _, text_of = fine_tuning.STUDIES[study]
    assert text_of(fine_tuning.kept(study)) in page.read_text()


@pytest.mark.parametrize("format", fine_tuning.FORMATS)
def test_training_loses_less_in_every_seed(format):
    """The statement of the page above its table."""
    losses = fine_tuning.losses_of(fine_tuning.kept("qat"))
    gaps = [losses[f"{format} {fine_tuning.DURING}", seed]
            - losses[f"{format} {fine_tuning.AFTER}", seed] for seed in range(1, 5)]  # fmt: skip
    assert max(gaps) < 0


def test_distillation_recovers_a_fifth_in_every_seed():
    """The statement of the page below its table."""
    losses = fine_tuning.losses_of(fine_tuning.kept("qad"))
    for seed in range(1, 4):
        teacher, ptq, qad = (losses[name, seed] for name in (fine_tuning.BASELINE, "PTQ", "QAD"))
        assert 0.15 < (ptq - qad) / (ptq - teacher) < 0.25
