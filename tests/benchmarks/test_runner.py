"""The runner of contenders: rows, ratios and tables; the record of a run."""

import json

from rich.console import Console

from benchmarks import quantize, runner


def test_rows_ratios_and_the_table(capsys):
    """Ratios of a time and of phases; one that refuses has its reason."""

    def refuses():
        raise RuntimeError("no FP8")

    builders = {"BF16": lambda: lambda mark: mark(), "own": lambda: lambda mark: None}
    times = {"BF16": 3.0, "own": 2.0}
    rows = runner.rows_of(
        builders | {"absent": refuses},
        lambda name, laps: {"ms": times[name], "both": {"median_ms": 2 * times[name]}},
        {"size": [1]}, 1e-6,
    )  # fmt: skip
    runner.add_ratios(rows, "as_fast", "BF16", "ms")
    runner.add_ratios(rows, "phases", "BF16", "ms", "both")
    _, own, absent = rows
    assert own["as_fast"] == 1.5 and own["phases"] == {"ms": 1.5, "both": 1.5}
    assert absent == {"size": [1], "contender": "absent", "refused": "RuntimeError: no FP8"}
    Console(width=80).print(runner.table(rows, "title", {"ms": "both", "ratio": "phases.both"}))
    text = capsys.readouterr().out
    assert all(word in text for word in ("title", "ratio", "1.5", "RuntimeError: no FP8"))


def test_a_record_over_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.timing, "ceilings", lambda: runner.Ceilings(1e12, {}, {}))
    run = lambda size, names, limits, seconds: [{"contender": n, "size": size} for n in names]  # noqa: E731
    file = tmp_path / "a.json"
    arguments = ["--output", str(file), "--sizes", "1x2", "3x4", "--contenders", "a"]
    runner.over_sizes("x", None, ["a", "b"], [quantize.Size(0, 0)], run, {})(arguments)
    record = json.loads(file.read_text())
    assert [row["size"] for row in record["rows"]] == [[1, 2], [3, 4]]
    assert record["ceilings"]["copy_tb_per_s"] == 1 and "engine" in record
