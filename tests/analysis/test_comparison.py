"""Comparisons of runs: figures against numbers computed by hand, the page, the command."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_lowbit.analysis.comparison import (
    compare,
    far_behind,
    final_loss,
    gap_curves,
    gaps,
    read_contenders,
    spike_score,
    visible_gap,
)
from megatron_lowbit.analysis.comparison_page import gaps_text, picture
from megatron_lowbit.errors import UserError
from megatron_lowbit.study.command import main
from tests.marks import others_slow


@pytest.fixture
def write_run(tmp_path):
    """Writes a run: noise by a seed, validations one an iteration, the seed that it records."""

    def write(
        name: str, scale: float, iterations: int = 200, speed: float = 1000.0,
        noise: int | None = None, validations: tuple[float | None, ...] = (),
        seed: int | None = None,
    ) -> Path:  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        if seed is not None:
            (folder / "study.json").write_text(json.dumps({"name": name, "seed": seed}))
        draw = np.random.default_rng(noise)
        with (folder / "metrics.jsonl").open("w") as file:
            for i in range(1, iterations + 1):
                loss = 2 + 8 / i + (0 if noise is None else draw.normal(scale=0.1))
                line = {"iteration": i, "lm_loss": scale * loss, "consumed_tokens": 64 * i,
                        "tokens_per_second": speed}  # fmt: skip
                if i <= len(validations):
                    line["validation_loss"] = validations[i - 1]
                file.write(json.dumps(line) + "\n")
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
    contenders = read_contenders(runs)
    first, second = compare(contenders)
    assert (first.gap, first.gap_error, first.seeds) == (0.0, 0.0, 3)
    assert second.gap == pytest.approx(statistics.fmean(more))
    assert second.gap_error == pytest.approx(statistics.stdev(more) / 3**0.5)
    tail = statistics.fmean(2 + 8 / i for i in range(191, 201))
    assert first.loss == pytest.approx(tail * statistics.fmean(base))
    assert first.loss_spread == pytest.approx(tail * statistics.stdev(base))
    assert (first.speed, second.speed) == (1000.0, 500.0)
    # At every step the figures are those of the ratios, which here are the same at all steps.
    baseline, other = gap_curves(contenders)
    assert not baseline.gap.any() and not baseline.error.any()
    assert other.gap == pytest.approx(second.gap)
    assert other.error == pytest.approx(second.gap_error)


def test_gaps_of_means(write_run):
    """Other numbers of seeds: two independent means, with the noise of all names together."""
    runs = [("base", write_run(f"b{i}", scale)) for i, scale in enumerate((1.0, 1.1))]
    runs += [("other", write_run(f"o{i}", scale)) for i, scale in enumerate((1.2, 1.3, 1.4))]
    runs += [("one", write_run("one", 1.05))]
    _, other, single = compare(read_contenders(runs))
    assert other.gap == pytest.approx(1.3 / 1.05 - 1)
    # Squares off the means 1.05 and 1.3: 2 x 0.05^2 and 2 x 0.1^2, of 1 + 2 + 0 degrees of freedom.
    noise = ((2 * 0.05**2 + 2 * 0.1**2) / 3) ** 0.5 / 1.05
    assert other.gap_error == pytest.approx(noise * (1 / 3 + 1 / 2) ** 0.5)
    assert single.gap_error == pytest.approx(noise * (1 + 1 / 2) ** 0.5)
    assert single.gap == pytest.approx(0.0) and np.isnan(single.loss_spread)
    unpaired = compare(read_contenders([("a", runs[0][1]), ("b", runs[1][1])]))
    assert np.isnan(unpaired[1].gap_error)


def test_gaps_of_recorded_seeds(write_run):
    """Some of the baseline's: seed by seed, with the noise of all; none of them: two means."""
    scales = {1: 1.0, 2: 1.1, 3: 1.3}
    runs = [("base", write_run(f"b{i}", scale, seed=i)) for i, scale in scales.items()]
    more = {3: 1.3 * 1.014, 2: 1.1 * 1.010}
    runs += [("two", write_run(f"t{i}", scale, seed=i)) for i, scale in more.items()]
    single_run = write_run("one", 1.3 * 1.020, seed=3) / "metrics.jsonl"
    runs += [("one", single_run), ("other", write_run("other", 1.2, seed=4))]
    _, two, single, other = compare(read_contenders(runs))
    noise = statistics.stdev((0.010, 0.014))
    assert (two.gap, single.gap) == (pytest.approx(0.012), pytest.approx(0.020))
    assert two.gap_error == pytest.approx(noise / 2**0.5)
    assert single.gap_error == pytest.approx(noise)
    assert other.gap == pytest.approx(1.2 / statistics.fmean(scales.values()) - 1)
    assert other.gap_error > 0.1
    with pytest.raises(UserError, match="has seed 3, as another run of 'two'; give another"):
        read_contenders([*runs, ("two", runs[2][1])])


def test_seeds_of_different_runs_are_not_paired(write_run):
    """As many runs, but of other seeds, or of unknown ones on one side: two independent means."""
    runs = [
        (name, write_run(f"{name}{seed}", 1 + seed / 10 + more, seed=seed))
        for name, seeds, more in (
            ("base", (1, 2), 0),
            ("same", (2, 1), 0.01),
            ("other", (1, 3), 0.01),
        )
        for seed in seeds
    ]
    runs += [("unknown", write_run(f"unknown{i}", 1.3 + i / 10)) for i in range(2)]
    _, same, other, unknown = compare(read_contenders(runs))
    assert same.gap == pytest.approx((0.01 / 1.1 + 0.01 / 1.2) / 2)
    assert other.gap == pytest.approx(0.01 / 1.1)
    assert unknown.gap == pytest.approx(1.35 / 1.15 - 1)


def test_gaps_are_of_the_seeds_that_both_have():
    _, (gap, _) = gaps([[3, 3.1], [3.03, 3.13, 3.23]], [(1, 2), (1, 2, 3)])
    assert gap == pytest.approx((0.03 / 3 + 0.03 / 3.1) / 2)


def test_the_gap_that_so_many_seeds_show(write_run, capsys):
    """By simulation: four of five studies with that true gap see more than two errors."""
    runs = [("base", write_run(f"b{i}", 1 + i / 1e9)) for i in range(4)]
    more = (-0.01, 0.03, 0.01, 0.05)
    runs += [("other", write_run(f"o{i}", 1 + gap)) for i, gap in enumerate(more)]
    _, other = compare(read_contenders(runs))
    gap, error = visible_gap(other.gap_error, 4, 16), other.gap_error / 2
    studies = np.random.default_rng(0).normal(gap, error, 100_000)
    share = (studies > 2 * error).mean()
    assert abs(share - 0.8) < 4 * (0.8 * 0.2 / 100_000) ** 0.5
    main(["compare", *(f"{name}={folder}" for name, folder in runs)])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"power of 80%: {100 * visible_gap(other.gap_error, 4, 4):.2g}% with 4, " in shown


@pytest.mark.parametrize("seeds", others_slow([4, 8], [4]))
def test_studies_of_noisy_runs_show_that_gap(seeds):
    """From losses on: six names, seeds that differ by more than their runs, noise as estimated."""
    generator, noise, count = np.random.default_rng(1), 0.005, 4000
    # The error that a study of four seeds finds on average: two runs' noise in each difference.
    gap = visible_gap(noise * math.sqrt(2 / 4), 4, seeds)
    of_seeds = 2 + generator.normal(scale=0.05, size=(count, 1, seeds))
    losses = of_seeds * (1 + generator.normal(scale=noise, size=(count, 6, seeds)))
    losses[:, 1] *= 1 + gap
    studies = [gaps(list(study)) for study in losses]
    share = np.mean([gaps_seen > 2 * error for _, (gaps_seen, error), *_ in studies])
    # An estimated error costs a percent: Student's t of 15 degrees of freedom and more, not z.
    assert 0.76 < share < 0.82
    false = np.mean([abs(gaps_seen) > 2 * error for _, _, (gaps_seen, error), *_ in studies])
    assert 0.03 < false < 0.08


def test_perplexity_is_that_of_the_last_validation(write_run, tmp_path, capsys):
    validated = {"b3": (9.0, math.log(3)), "b5": (9.0, math.log(5)), "lost": (2.0, None),
                 "huge": (1e4,), "none": ()}  # fmt: skip
    runs = [
        ("base" if name[0] == "b" else name, write_run(name, 1.0, noise=seed, validations=losses))
        for seed, (name, losses) in enumerate(validated.items())
    ]
    base, *others = compare(read_contenders(runs))
    assert base.perplexity == pytest.approx(4) and base.perplexity_spread == pytest.approx(2**0.5)
    assert all(math.isnan(row.perplexity) for row in others)
    named = [f"{name}={folder}" for name, folder in runs]
    main(["compare", *named, "--output", str(tmp_path / "out")])
    assert "4.000 ± 1.414" in capsys.readouterr().out
    assert "<td>4.000 ± 1.414</td>" in (tmp_path / "out" / "comparison.html").read_text()


@pytest.mark.parametrize(("interval", "score"), [(1, 7.0 + 4.0), (10, math.nan)])
def test_spikes_are_scored_where_every_step_is_logged(tmp_path, interval, score):
    """A spike of two steps; sigma, of the last 30%, is 1."""
    losses = [5.0] * 8 + [15.0, 12.0] + [5.0] * 4 + [4.0, 6.0] * 3
    rows = [{"iteration": i + 1, "lm_loss": losses[i]} for i in range(0, 20, interval)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = compare(read_contenders([("run", tmp_path)]))
    assert row.spikes == pytest.approx(score, nan_ok=True)


def test_gap_curves_end_at_the_gaps_of_the_table(write_run):
    """Their bands, too: of names with as many seeds as the baseline, and of others."""
    scales = {"base": (1.0, 1.1, 1.3), "paired": (1.02, 1.11, 1.33), "fewer": (1.2, 1.3)}
    runs = [
        (name, write_run(f"{name}{seed}", scale, noise=10 * seed + len(name)))
        for name, factors in scales.items()
        for seed, scale in enumerate(factors)
    ]
    contenders = read_contenders(runs)
    rows, curves = compare(contenders), gap_curves(contenders)
    for row, curve in zip(rows, curves, strict=True):
        assert len(curve.gap) == 200 and curve.tokens[-1] == 200 * 64
        assert curve.gap[-1] == pytest.approx(row.gap)
        assert curve.error[-1] == pytest.approx(row.gap_error)
    assert rows[1].gap_error < 0.5 * rows[2].gap_error  # the spread between seeds is no noise


def test_a_run_that_began_from_anothers_checkpoint(write_run):
    """Its final loss and its curve are of the same iterations as a whole run's."""
    full = write_run("whole", 1.5)
    lines = (full / "metrics.jsonl").read_text().splitlines(keepends=True)
    begun = full.with_name("begun.jsonl")
    begun.write_text("".join(lines[160:]))
    first, second = read_contenders([("whole", full), ("begun", begun)])
    assert len(second.curves[0].losses) == len(first.curves[0].losses) - 160
    assert final_loss(second.curves[0]) == final_loss(first.curves[0])
    _, curve = gap_curves([first, second])
    assert np.isnan(curve.gap[:169]).all() and np.all(curve.gap[169:] == 0)
    # A sum over fewer steps, divided by the deviation of later ones, is another figure.
    whole, begun = compare([first, second])
    assert whole.spikes >= 0 and math.isnan(begun.spikes)


def test_a_run_is_no_second_seed_of_its_own(write_run):
    """Nor is another run of the same seed: the noise would be 0."""
    first, second, copy = (write_run(name, 1.5, noise=ord(name[0])) for name in ("a", "b", "a2"))
    runs = [("x", first), ("x", second)]
    read_contenders([*runs, ("y", first)])
    for again in (first, copy / "metrics.jsonl"):
        with pytest.raises(UserError, match="has the losses of another run of 'x'; give another"):
            read_contenders([*runs, ("x", again)])


def test_a_shorter_run_has_no_gap_at_the_end(write_run, capsys):
    """Nor does it take the others' standard errors away."""
    runs = [(name, write_run(f"{name}{i}", 1.0 + i / 10)) for name in "ab" for i in range(2)]
    runs += [("c", write_run(f"c{i}", 1.5 + i / 10, iterations=150)) for i in range(2)]
    contenders = read_contenders(runs)
    _, full_row, short_row = compare(contenders)
    assert math.isfinite(full_row.gap) and math.isfinite(full_row.gap_error)
    assert math.isnan(short_row.gap) and math.isnan(short_row.gap_error)
    main(["compare", *(f"{name}={folder}" for name, folder in runs)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "│ none │" in shown and "Rows without a gap have runs of other lengths than a." in shown
    _, other, short = gap_curves(contenders)
    assert np.isfinite(short.gap[:150]).all() and np.isnan(short.gap[150:]).all()
    assert np.isfinite(other.error).all() and np.isnan(short.error[150:]).all()
    assert final_loss(contenders[2].curves[0]) == pytest.approx(
        1.5 * statistics.fmean(2 + 8 / i for i in range(143, 151))
    )


def test_a_run_that_diverged_has_no_gap(write_run, tmp_path, capsys):
    """Its losses from before the divergence do not count."""
    runs = [("base", write_run("base", 1.0)), ("lost", write_run("lost", 1.01))]
    lines = (tmp_path / "lost" / "metrics.jsonl").read_text().splitlines()
    lost = [json.dumps(json.loads(line) | {"lm_loss": None}) for line in lines[195:]]
    (tmp_path / "lost" / "metrics.jsonl").write_text("\n".join([*lines[:195], *lost, ""]))
    rows = compare(read_contenders(runs))
    assert math.isnan(rows[1].loss) and math.isnan(rows[1].gap)
    assert far_behind(rows, 4) == {"lost"} and gaps_text(rows) == "lost diverged (1 seed)"
    _, curve = gap_curves(read_contenders(runs))
    assert curve.gap[:195] == pytest.approx(0.01) and np.isnan(curve.gap[195:]).all()
    for order in (1, -1):
        main(["compare", *(f"{name}={folder}" for name, folder in runs[::order])])
        shown = " ".join(capsys.readouterr().out.split())
        assert "│ diverged │" in shown and "none:" not in shown


@pytest.mark.filterwarnings("error")
def test_seeds_of_the_baseline_without_a_common_iteration(write_run):
    """They have final losses, but no gaps over training."""
    runs = [(name[0], write_run(name, 1 + i / 10)) for i, name in enumerate(("a1", "a2", "b"))]
    for folder, start in ((runs[0][1], 0), (runs[1][1], 1)):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[start::2]))
    contenders = read_contenders(runs)
    assert compare(contenders)[0].loss > 2
    assert not any(len(curve.gap) for curve in gap_curves(contenders))
    assert picture(contenders).startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("names", "panels"), [(1, 2), (8, 2), (9, 8), (12, 11)])
def test_the_picture(write_run, monkeypatch, names, panels):
    """Bands are one standard error wide; more names than colors have a panel each."""
    shares = [number / 100 for number in range(names)]
    runs = [
        (f"name {number}", write_run(f"{number}-{seed}", (1 + seed) * (1 + share * (1 + seed / 9))))
        for number, share in enumerate(shares)
        for seed in range(2)
    ]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    contenders = read_contenders(runs)
    picture(contenders)
    axes = [axis for axis in drawn[0].axes if axis.axison]
    assert len(axes) == panels
    bands = [band for axis in axes for band in axis.collections]
    assert len(bands) == names - 1
    for band, row in zip(bands, compare(contenders)[1:], strict=True):
        low, high = band.get_paths()[0].get_extents().intervaly
        assert (high - low) / 2 == pytest.approx(100 * row.gap_error)
        assert (high + low) / 2 == pytest.approx(100 * row.gap)


@pytest.mark.filterwarnings("error")
def test_names_of_the_legend_are_as_they_are(write_run, monkeypatch):
    """Matplotlib ignores labels that begin with ``_``, and takes ``$`` for formulas."""
    names, legends, save = ["_first", "$\\none$", "_third"], [], Figure.savefig

    def saved(figure, *args, **settings):
        legends.extend([text.get_text() for text in ax.get_legend().texts] for ax in figure.axes)
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", saved)
    picture(read_contenders([(name, write_run(f"run {name[1]}", 1.0)) for name in names]))
    above, below = legends
    assert above == names and [text.partition(":")[0] for text in below] == names[1:]


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


def by_the_equation(losses):
    last = losses[-math.ceil(len(losses) * 3 / 10) :]
    mean = sum(last) / len(last)
    sigma = math.sqrt(sum((loss - mean) ** 2 for loss in last) / len(last))
    total = 0.0
    for t, loss in enumerate(losses):
        minimum = min(losses[max(0, t - 7) : t + 1])
        total += max((loss - minimum) / sigma - 3, 0)
    return total


@pytest.mark.parametrize("steps", [4, 7, 8, 9, 10, 50, 333])
def test_the_spike_score_equals_the_equation(steps):
    random = np.random.default_rng(steps)
    losses = 4 / np.sqrt(np.arange(1, steps + 1)) + 0.02 * random.standard_normal(steps)
    losses[random.integers(0, steps, size=steps // 10)] += 1.0
    assert spike_score(losses) == pytest.approx(by_the_equation(losses.tolist()), rel=1e-12)


def test_steps_that_are_not_finite_have_no_spikes():
    losses = [5.0] * 14 + [4.0, 6.0] * 3
    losses[8] = 15.0
    broken = [*losses[:3], math.nan, *losses[3:], math.inf]
    assert spike_score(broken) == spike_score(losses) == 7.0


@pytest.mark.parametrize("losses", [[], [1.0], [3.0, 2.0, 1.0], [1.0] * 100, [math.nan] * 10])
def test_no_spike_score_without_deviation(losses):
    assert math.isnan(spike_score(losses))
