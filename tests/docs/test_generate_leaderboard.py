"""The page of FP4 methods: figures against numbers computed by hand, and what is refused."""

import json
import math
import re
import statistics
from pathlib import Path

import leaderboard
import pytest
from pages import write_finished

from megatron_lowbit.analysis.comparison import gap_curves
from megatron_lowbit.recipes.command import main as recipes
from megatron_lowbit.study.command import main as study

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["-P", "-c", "pretrain", "@examples/gpt-60m.args", "--bf16"]


@pytest.fixture
def write(tmp_path):
    """Function that writes a finished run, whose last tenth has this loss."""

    def finished(name: str, seed: int, loss: float, *recipe: str, more: tuple = ()) -> Path:
        command = [*ARGUMENTS, *recipe, *more, "--data-path", f"data{seed}", "--seed", str(seed)]
        machine = {"gpu": "GPU", "torch": "2", "commit": "abc", "cpu": "CPU"}
        losses = [9.0] * 90 + [loss] * 10
        lines = [{"iteration": i, "lm_loss": x, "consumed_tokens": 10_000 * i}
                 for i, x in enumerate(losses, 1)]  # fmt: skip
        return write_finished(tmp_path / "runs", name, seed, command, machine, lines)

    return finished


def bf16(write, *losses: float) -> Path:
    for seed, loss in enumerate(losses, 1):
        folder = write("bf16", seed, loss, "--precision-recipe", "bf16")
    return folder


@pytest.fixture(autouse=True)
def picture_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "PICTURE", tmp_path / "leaderboard.png")


def built(tmp_path, *folders: Path) -> list[list[str]]:
    """Return the cells of the page's table."""
    arguments = ["--results", str(tmp_path / "kept.json"), "--page", str(tmp_path / "page.md")]
    leaderboard.main([*map(str, folders), *arguments])
    lines = (tmp_path / "page.md").read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith("| ---")))
    rows = [line for line in lines[start + 1 :] if line.startswith("|")]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


NVFP4 = ("--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none")


def test_the_table(write, tmp_path):
    """Best first; gaps seed by seed, speeds and bits from their own sources."""
    folder = bf16(write, 2.0, 2.2)
    for seed, (four, more) in enumerate(((2.04, 2.02), (2.222, 2.211)), 1):
        write("nvfp4", seed, four, *NVFP4)
        write("mine", seed, more, "--precision-recipe", "mxfp4-backward", "--recipe-set",
              "grad.rounding=nearest")  # fmt: skip
    base, mine, nvfp4 = built(tmp_path, folder)
    ratios = {"nvfp4": (0.02, 0.01), "mine": (0.01, 0.005)}
    variances = [statistics.variance(own) for own in ratios.values()]
    error = 100 * math.sqrt(statistics.fmean(variances) / 2)
    assert base[:6] == ["bf16", "[bf16](../recipes/README.md#bf16)", "2", "2.1000", "", ""]
    assert nvfp4[0] == "nvfp4" and nvfp4[4] == f"+1.50% ± {error:.2f}"
    assert mine[0] == "mine" and mine[4] == f"+0.75% ± {error:.2f}"
    rows = json.loads((ROOT / "benchmarks/results/model-fp4-h200.json").read_text())["rows"]
    times = {row["contender"]: row["both"]["median_ms"] for row in rows}
    to_nvfp4 = [100 * (2.02 / 2.04 - 1), 100 * (2.211 / 2.222 - 1)]
    found = statistics.fmean(to_nvfp4), statistics.stdev(to_nvfp4) / math.sqrt(2)
    assert mine[5] == "{:+.2f}% ± {:.2f}".format(*found) and nvfp4[5] == ""
    assert base[6] == f"{times['nvfp4 in TE'] / times['TE BF16']:.2f}"
    assert (nvfp4[6], mine[6]) == ("1.00", "not measured")
    # fprop's two operands have 16 bits, the others 4 and 8 for 32 elements.
    assert base[7] == "16" and nvfp4[7] == "4.5"
    assert float(mine[7]) == pytest.approx((2 * 16 + 4 * 4.25) / 6, abs=0.005)
    assert nvfp4[8] == "`--precision-recipe nvfp4 --recipe-set bf16_blocks=none`"
    text = " ".join((tmp_path / "page.md").read_text().split())
    assert f"With 2 seeds, a true gap of {2.8416 * error:.2g}% exceeds" in text
    assert "on 1M tokens, with 2 or more seeds per row" in text
    assert "[examples/gpt-60m.args](../../examples/gpt-60m.args)" in text
    assert "Runs: GPU, torch 2, commit abc." in text


def test_a_run_that_has_not_finished_is_no_row(write, tmp_path):
    folder = bf16(write, 2.0, 2.2)
    for seed in (1, 2):
        write("nvfp4", seed, 2.3, *NVFP4)
        write("mine", seed, 2.1, "--precision-recipe", "mxfp8")
        file = folder / f"mine-{seed}" / "study.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"finished": False}))
    assert [row[0] for row in built(tmp_path, folder)] == ["bf16", "nvfp4"]


def test_rows_with_two_stored_curves_are_drawn(write, tmp_path):
    """Their gaps end at the table's; the baseline is first, wherever its runs are stored."""
    write("mine", 1, 2.02, "--precision-recipe", "mxfp8")
    folder = bf16(write, 2.0, 2.2, 2.4)
    write("mine", 2, 9.0, "--precision-recipe", "mxfp8")
    write("mine", 3, 2.412, "--precision-recipe", "mxfp8")
    write("nvfp4", 1, 2.3, *NVFP4)
    table = built(tmp_path, folder)
    runs = json.loads((tmp_path / "kept.json").read_text())
    for run in runs:
        if (run["name"], run["seed"]) == ("bf16", 2):
            del run["losses"]
    contenders = leaderboard.drawn(runs)
    assert [(c.name, c.seeds) for c in contenders] == [("bf16", (1, 3)), ("mine", (1, 3))]
    curve = gap_curves(contenders, leaderboard.SHARE)[1]
    assert curve.tokens[-1] == 1_000_000 and curve.gap[-1] == pytest.approx(0.0075)
    assert "mine" in {row[0] for row in table}
    assert "leaderboard.png" in (tmp_path / "page.md").read_text()
    old = [{key: run[key] for key in run if key != "losses"} for run in runs]
    assert leaderboard.drawn(old) == []


def test_runs_are_kept(write, tmp_path):
    """A second folder adds its rows; without folders the same page is written."""
    folder = bf16(write, 2.0, 2.2)
    built(tmp_path, folder)
    for path in folder.iterdir():
        path.rename(tmp_path / path.name)
    for seed in (1, 2):
        write("nvfp4", seed, 2.3, *NVFP4)
    both = built(tmp_path, folder)
    assert [row[0] for row in both] == ["bf16", "nvfp4"]
    assert built(tmp_path) == both


def test_a_row_with_fewer_seeds(write, tmp_path):
    """Its gap is of its own seeds, its error of the noise of all rows."""
    folder = bf16(write, 2.0, 2.2)
    write("mine", 2, 2.211, "--precision-recipe", "quartet2")
    for seed, loss in enumerate((2.04, 2.222), 1):
        write("nvfp4", seed, loss, *NVFP4)
    _, mine, nvfp4 = built(tmp_path, folder)
    deviation = 100 * statistics.stdev((0.02, 0.01))
    assert mine[2:5] == ["1", "2.2110", f"+0.50% ± {deviation:.2f}"]
    assert nvfp4[4] == f"+1.50% ± {deviation / math.sqrt(2):.2f}"


def test_one_seed_says_nothing_of_noise(write, tmp_path):
    folder = bf16(write, 2.0)
    write("nvfp4", 1, 2.04, *NVFP4)
    assert built(tmp_path, folder)[1][4] == "+2.00%"
    assert (
        "Gaps cannot be judged without an estimate of the noise."
        in (tmp_path / "page.md").read_text()
    )


def test_a_run_that_diverged_is_last(write, tmp_path):
    folder = bf16(write, 2.0, 2.2)
    for seed in (1, 2):
        write("lost", seed, 2.3, "--precision-recipe", "quartet2")
        write("nvfp4", seed, 2.4 + seed / 9, *NVFP4)
    file = folder / "lost-1" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lost = [json.dumps(json.loads(line) | {"lm_loss": None}) for line in lines[95:]]
    file.write_text("".join(f"{line}\n" for line in (*lines[:95], *lost)))
    table = built(tmp_path, folder)
    assert [row[0] for row in table] == ["bf16", "nvfp4", "lost"] and table[2][4] == "diverged"


def test_what_cannot_be_compared(write, tmp_path):
    folder = bf16(write, 2.0, 2.2)
    write("nvfp4", 3, 2.3, *NVFP4)
    with pytest.raises(SystemExit, match=r"nvfp4: seeds \[3\], bf16's \[1, 2\]"):
        built(tmp_path, folder)
    write("nvfp4", 2, 2.3, *NVFP4, more=("--lr", "1"))
    with pytest.raises(SystemExit, match="nvfp4, seed 2: other arguments or tokens than bf16"):
        built(tmp_path, folder)
    with pytest.raises(SystemExit, match="no finished run"):
        built(tmp_path, tmp_path / "none")
    assert not (tmp_path / "page.md").exists() and not (tmp_path / "kept.json").exists()


def test_the_baseline_quantizes_nothing(write, tmp_path):
    folder = write("nvfp4", 1, 2.3, *NVFP4)
    with pytest.raises(SystemExit, match="no run of a recipe that quantizes nothing"):
        built(tmp_path, folder)


TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --train-iters 2
    --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 --eval-iters 0 --eval-interval 2
    --log-interval 1 --save-interval 2
    --mock-data --tokenizer-type NullTokenizer --vocab-size 100
"""


@pytest.mark.slow
def test_a_recipe_of_ones_own_in_three_commands(tmp_path, monkeypatch, capsys):
    """Those of the page, with a tiny study in place of its own; runs of bf16 are made once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("study.yaml").write_text(
        f"arguments: >\n  {' '.join(TINY.split())}\nseeds: [1, 2]\n"
        "runs: {bf16: --precision-recipe bf16, nvfp4: --precision-recipe nvfp4}\n"
    )
    text = (ROOT / "recipes" / "quartet2.yaml").read_text()
    Path("mine.yaml").write_text(text.replace("name: quartet2", "name: mine"))
    [block] = re.findall(
        "```\n(.*?)```", leaderboard.PAGE.read_text().replace("\\\n", ""), re.DOTALL
    )
    show, run, write = (line.split() for line in block.splitlines())
    recipes(show[1:])
    assert "recipe mine: 40 of 40 linear layers quantized" in capsys.readouterr().out
    own = run[: run.index("--")]
    own[own.index("examples/studies/leaderboard.yaml")] = "study.yaml"
    study(own[1:])
    assert {p.name for p in Path("runs/leaderboard").iterdir() if p.is_dir()} == {
        "bf16-1", "bf16-2", "mine-1", "mine-2",
    }  # fmt: skip
    assert write[:2] == ["python", "docs/generate/leaderboard.py"]
    rows = built(tmp_path, Path(write[2]))
    assert {row[0]: row[1] for row in rows} == {
        "bf16": "[bf16](../recipes/README.md#bf16)", "mine": "`mine.yaml`",
    }  # fmt: skip


def test_a_recipe_that_switches_has_the_speed_of_both_parts(tmp_path):
    """Four fifths of a run are torchao-v2's."""
    times = {"TE BF16": 90, "nvfp4 in TE": 100, "torchao-v2 in TE": 125,
             "torchao-v2 fprop=null in TE": 100}  # fmt: skip
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write_speeds(first, times)
    write_speeds(second, {"TE BF16": 50, "nvfp4 in TE": 50, "mxfp8 in TE": 40})
    speeds, _ = leaderboard.read_speeds([first, second])
    assert speeds["torchao-v2-late-bf16"] == pytest.approx(100 / (0.8 * 125 + 0.2 * 100))
    assert (speeds["mxfp8"], speeds["bf16"]) == (1.25, pytest.approx(1 / 0.9))


def write_speeds(file: Path, times: dict[str, float]) -> None:
    rows = [{"contender": name, "both": {"median_ms": ms}} for name, ms in times.items()]
    file.write_text(json.dumps({"machine": {"gpu": "GPU"}, "rows": rows}))
