"""Loss curves: the numbers drawn, and the command that draws them."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_lowbit.analysis.loss_curve import (
    plot_loss,
    read_losses,
    recent_means,
    relative_gap,
    smooth,
)
from megatron_lowbit.errors import UserError

TOOL = Path(__file__).parents[2] / "tools" / "plot_loss.py"
main = runpy.run_path(str(TOOL))["main"]


@pytest.fixture
def write_run(tmp_path):
    def write(name, scale=1.0, iterations=range(1, 101)):
        path = tmp_path / name / "metrics.jsonl"
        path.parent.mkdir()
        records = [{"iteration": i, "lm_loss": scale * (2 + 1 / i)} for i in iterations]
        records[3]["lm_loss"] = None
        records.insert(50, {"iteration": 50, "validation_loss": scale * 2.1})
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def test_losses_are_read(write_run):
    curve = read_losses(write_run("a"))
    assert curve.iterations.tolist() == list(range(1, 101))
    assert curve.losses[0] == 3.0 and np.isnan(curve.losses[3])
    assert curve.validation_iterations.tolist() == [50]
    assert curve.validation_losses.tolist() == [2.1]


@pytest.mark.parametrize("part", ['{"iter', '{"iteration": 101, "lm_loss": 1.0}'])
def test_a_line_that_is_being_written_is_ignored(part, write_run):
    path = write_run("a")
    with path.open("a") as file:
        file.write(part)
    assert read_losses(path).iterations.tolist() == list(range(1, 101))
    with path.open("a") as file:
        file.write("}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:102: "):
        read_losses(path)


def test_smoothing_is_centred_and_leaves_out_nan():
    values = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    assert smooth(values, 3).tolist() == [1.5, 1.5, 3.0, 4.5, 4.5]
    assert np.isnan(smooth(np.full(3, np.nan), 3)).all()
    assert smooth(values, 1)[[0, 4]].tolist() == [1.0, 5.0]
    assert not len(smooth(np.array([]), 1))


def test_recent_means():
    means = recent_means(np.array([1.0, 2.0, np.nan, 4.0, 6.0]), 2)
    assert means == pytest.approx([1.0, 1.5, np.nan, np.nan, 5.0], nan_ok=True)


def test_the_gap_is_relative_at_common_iterations(write_run):
    reference = read_losses(write_run("a"))
    run = read_losses(write_run("b", scale=1.02, iterations=range(10, 131, 5)))
    iterations, gap = relative_gap(run, reference)
    assert iterations.tolist() == list(range(10, 101, 5))
    np.testing.assert_allclose(gap[np.isfinite(gap)], 0.02, rtol=1e-9)


@pytest.mark.parametrize("number", [1, 2, 12])
def test_a_picture_is_written(write_run, tmp_path, number):
    runs = {f"run {i}": write_run(f"run{i}", scale=1 + i / 100) for i in range(number)}
    plot_loss(runs, tmp_path / "plots" / "loss.png")
    assert (tmp_path / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["loss.png"]


@pytest.mark.filterwarnings("error")
def test_names_of_the_legend_are_as_they_are(write_run, tmp_path, monkeypatch):
    """Matplotlib ignores labels that begin with ``_``, and takes ``$`` for formulas."""
    legends, save = [], Figure.savefig

    def saved(figure, *args, **settings):
        legends.append([text.get_text() for text in figure.axes[0].get_legend().texts])
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", saved)
    plot_loss({"_a": write_run("a"), "$\\b$": write_run("b")}, tmp_path / "loss.png")
    assert legends == [["_a", "_a, validation", "$\\b$", "$\\b$, validation"]]


def test_runs_without_a_common_iteration_have_no_gap(write_run, tmp_path):
    first = write_run("a", iterations=range(2, 100, 2))
    second = write_run("b", iterations=range(1, 100, 2))
    plot_loss({"a": first, "b": second}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_bad_files(write_run, tmp_path):
    good = write_run("a")
    with pytest.raises(UserError, match=r"loss.svg: the name must end in .png"):
        plot_loss({"a": good}, tmp_path / "loss.svg")
    with pytest.raises(UserError, match=r"none.jsonl: cannot be read"):
        plot_loss({"a": tmp_path / "none.jsonl"}, tmp_path / "loss.png")
    for content, message in (
        ("", "holds no lm_loss"),
        ("{}\n", "holds no lm_loss"),
        ('{"iteration": 1, "lm_loss": 2.0}\n{"lm_loss": 2.0}\n', ":2: needs the entry 'iteration'"),
        ("[]\n3\n", r":1: holds no JSON object, but \[\]"),
        ("{}\n\n", ":2: not valid JSON"),
        ('{"iteration": 1, "lm_loss": 1e999}\n', ":1: lm_loss inf: must be a finite number"),
        ('{"iteration": 1e999, "lm_loss": 1}\n', ":1: iteration inf: must be an integer"),
    ):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(content)
        with pytest.raises(UserError, match=message):
            plot_loss({"a": bad}, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_the_command(write_run, tmp_path):
    first, second = write_run("a"), write_run("b")
    main([f"BF16={first}", str(second), "--output", str(tmp_path / "loss.png")])
    assert (tmp_path / "loss.png").is_file()
    with pytest.raises(UserError, match="two runs are named 'a'"):
        main([str(first), f"a={second}", "--output", str(tmp_path / "loss.png")])
    command = [sys.executable, TOOL, "x=missing.jsonl", "--output", tmp_path / "x.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    reason = "cannot be read as metrics.jsonl (No such file or directory)"
    assert done.stderr == f"error: missing.jsonl: {reason}\n"
