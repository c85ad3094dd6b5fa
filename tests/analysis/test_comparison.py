"""Comparisons of runs: figures against numbers computed by hand, the page, the command."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from megatron_lowbit.analysis.comparison import compare, final_loss, gap_curve, read_contenders
from megatron_lowbit.errors import UserError
from megatron_lowbit.study.command import main


@pytest.fixture
def write_run(tmp_path):
    def write(name: str, scale: float, iterations: int = 200, speed: float = 1000.0) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            {"iteration": i, "lm_loss": scale * (2 + 8 / i), "consumed_tokens": 64 * i,
             "tokens_per_second": speed}
            for i in range(1, iterations + 1)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return write


def test_gaps_seed_by_seed(write_run):
    """As many seeds on both sides: the spread between seeds is no noise of the gap."""
    base, more = (1.0, 1.1, 1.3), (0.010, 0.012, 0.017)
    runs = [("base", write_run(f"b{i}", scale)) for i, scale in enumerate(base)]
    runs += [
        ("other", write_run(f"o{i}", scale * (1 + gap), speed=500.0))
        for i, (scale, gap) in enumerate(zip(base, more, strict=True))
    ]
    first, second = compare(read_contenders(runs))
    assert (first.gap, first.gap_error, first.seeds) == (0.0, 0.0, 3)
    assert second.gap == pytest.approx(statistics.fmean(more))
    assert second.gap_error == pytest.approx(statistics.stdev(more) / 3**0.5)
    tail = statistics.fmean(2 + 8 / i for i in range(191, 201))
    assert first.loss == pytest.approx(tail * statistics.fmean(base))
    assert first.loss_spread == pytest.approx(tail * statistics.stdev(base))
    assert (first.speed, second.speed) == (1000.0, 500.0)


def test_gaps_of_means(write_run):
    """Other numbers of seeds: two independent means, with the noise of all names together."""
    runs = [("base", write_run(f"b{i}", scale)) for i, scale in enumerate((1.0, 1.1))]
    runs += [("other", write_run(f"o{i}", scale)) for i, scale in enumerate((1.2, 1.3, 1.4))]
    runs += [("one", write_run("one", 1.05))]
    _, other, one = compare(read_contenders(runs))
    assert other.gap == pytest.approx(1.3 / 1.05 - 1)
    # Squares off the means 1.05 and 1.3: 2 x 0.05^2 and 2 x 0.1^2, of 1 + 2 + 0 degrees of freedom.
    noise = ((2 * 0.05**2 + 2 * 0.1**2) / 3) ** 0.5 / 1.05
    assert other.gap_error == pytest.approx(noise * (1 / 3 + 1 / 2) ** 0.5)
    assert one.gap_error == pytest.approx(noise * (1 + 1 / 2) ** 0.5)
    assert one.gap == pytest.approx(0.0) and np.isnan(one.loss_spread)
    alone = compare(read_contenders([("a", runs[0][1]), ("b", runs[1][1])]))
    assert np.isnan(alone[1].gap_error)


def with_validation(folder: Path, *losses: float | None) -> Path:
    """Add validations to a run, one an iteration."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line, loss in zip(lines, losses, strict=False):
        line["validation_loss"] = loss
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_perplexity_is_that_of_the_last_validation(write_run, tmp_path, capsys):
    runs = [("base", with_validation(write_run(f"b{i}", 1.0), 9.0, math.log(i))) for i in (3, 5)]
    runs += [("lost", with_validation(write_run("lost", 1.0), 2.0, None))]
    runs += [("huge", with_validation(write_run("huge", 1.0), 1e4))]
    runs += [("none", write_run("none", 1.0))]
    base, *others = compare(read_contenders(runs))
    assert base.perplexity == pytest.approx(4) and base.perplexity_spread == pytest.approx(2**0.5)
    assert all(math.isnan(row.perplexity) for row in others)
    named = [f"{name}={folder}" for name, folder in runs]
    main(["compare", *named, "--output", str(tmp_path / "out")])
    assert "4.000 ± 1.414" in capsys.readouterr().out
    assert "<td>4.000 ± 1.414</td>" in (tmp_path / "out" / "comparison.html").read_text()


def test_spikes_are_scored_by_the_step(tmp_path, capsys):
    """A spike of eight steps, by the paper's equation: 0 below 3 sigma, sigma 1 by construction."""
    # The losses are 9 and 11, sigma 1: elsewhere no step is 3 above its minimum.
    losses = [9.0 + 2 * (step % 2) for step in range(100)]
    for step, height in enumerate((6, 10, 8, 6, 5, 4.5, 4.25, 4), start=41):
        losses[step] = 9.0 + height
    # All but the last still have a 9 among their last 8 steps; its minimum is 9 + 4 itself.
    expected = sum(height - 3 for height in (6, 10, 8, 6, 5, 4.5, 4.25))
    scores = []
    for interval in (1, 10):
        folder = tmp_path / str(interval)
        folder.mkdir()
        rows = [{"iteration": i + 1, "lm_loss": losses[i]} for i in range(0, 100, interval)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        scores.append(compare(read_contenders([("run", folder)]))[0].spikes)
    assert scores[0] == pytest.approx(expected, rel=1e-12)
    assert math.isnan(scores[1])


def test_gap_curves(write_run):
    runs = [("base", write_run(f"b{i}", scale)) for i, scale in enumerate((0.9, 1.1))]
    runs += [("other", write_run("o", 1.5, iterations=150))]
    base, other = read_contenders(runs)
    band = gap_curve(base, base, window=5)
    assert band.least == pytest.approx(-0.1) and band.largest == pytest.approx(0.1)
    assert band.mean == pytest.approx(0.0, abs=1e-12)
    gap = gap_curve(other, base, window=5)
    assert gap.tokens[-1] == 150 * 64 and gap.mean == pytest.approx(0.5)
    assert final_loss(other.curves[0]) == pytest.approx(
        1.5 * statistics.fmean(2 + 8 / i for i in range(143, 151))
    )


def test_the_command(write_run, tmp_path, capsys):
    first, second = write_run("a", 1.0), write_run("b", 1.01)
    main(["compare", f"<bf16>={first}", str(second), "--output", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "gap to <bf16>" in shown and "+1.00%" in shown
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "gap to &lt;bf16&gt;" in page and "data:image/png;base64,iVBOR" in page
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"none/?.*cannot be read"):
        main(["compare", str(tmp_path / "none")])
