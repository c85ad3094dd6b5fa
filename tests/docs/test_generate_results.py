"""The page of results: figures against numbers computed by hand, and what is refused."""

import json
from pathlib import Path

import pytest
import results
import steps
from matplotlib.figure import Figure

SPEEDS = {steps.BF16: 1000, steps.OWN_FP8: 800, "fp8-tile": 1200, "nvfp4": 900, "quartet2": 700}
IN_GRAPHS = dict(zip(steps.CHOICES, (1100, 1375, 1500, 1650, 2200), strict=True))
"""Of README's picture; H200s are not faster."""


def row(model: str, precision: str, graphs: bool = False, speed: int = 1000, **more) -> dict:
    name = f"{model} {'graphs ' if graphs else ''}{precision}"
    figures = {"tokens_per_s": speed, "tflop_per_s": 300.4, "mfu": 0.3037, "peak_gib": 61.25,
               "median_ms": 612.3, "fastest_ms": 583.4}  # fmt: skip
    command = f"torchrun pretrain_gpt.py --precision-recipe {precision.split()[-1]}"
    return {
        "case": name, "model": model, "precision": precision, "graphs": graphs,
        "date": "2026-11-25", "commit": "abcdef0123456789", "command": command,
        **(more or figures),
    }  # fmt: skip


def a_file(kind: str, rows: list[dict]) -> str:
    machine = {"gpu": f"NVIDIA {kind.upper()}", "torch": "2.11", "transformer-engine": "2.20"}
    models = {"llama-1b": "The 1B", "llama-8b": "The 8B"}
    return json.dumps({"machine": machine, "models": models, "peak_tflops": 989, "rows": rows})


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of results with a file of each GPU, and a root with an own README.

    Pictures that are made there are empty.
    """
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: file.touch())
    (tmp_path / "docs" / "images").mkdir(parents=True)
    (tmp_path / "README.md").write_text("a\n\n<!-- results: made -->\n\n<!-- /results -->\n\nb\n")
    rows = [row("llama-8b", name, speed=speed) for name, speed in SPEEDS.items()]
    rows += [row("llama-8b", name, True, speed) for name, speed in IN_GRAPHS.items()]
    rows += [row("llama-1b", steps.BF16, error="RuntimeError: out of memory")]
    for kind in steps.KINDS:
        (tmp_path / f"flagship-{kind}.json").write_text(a_file(kind, rows))
    return tmp_path


def page(place: Path) -> str:
    results.main(["--results", str(place), "--root", str(place)])
    return (place / "docs" / "results.md").read_text()


def cells(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_steps_are_compared_on_their_machine(place):
    h100, h200 = page(place).split("## Whole training steps on one ")[1:]
    assert h100.startswith("NVIDIA H100") and h200.startswith("NVIDIA H200")
    assert cells(h100, "fp8-tile") == [
        "612 (583)", "1,200", "300", "30.4%", "61.2", "1.20", "1.50", "", "",
    ]  # fmt: skip
    assert cells(h100, steps.BF16)[-4:] == ["1.00", "1.25", "", ""]
    assert "- llama-1b Megatron-LM BF16: RuntimeError: out of memory" in h100


def test_ratios_have_the_losses_that_they_name(place):
    """The last is to rows of the same loss; a second file's rows stand in the declared order."""
    more = {steps.TENSORWISE: 1250, "nvfp4, own loss": 1492, "mxfp8": 1700}
    rows = [row("llama-8b", name, True, speed) for name, speed in more.items()]
    (place / "flagship-h100-2.json").write_text(a_file("h100", rows))
    h100, h200 = page(place).split("## Whole training steps on one ")[1:]
    headings = "| × blockwise | × tensorwise, native fused loss | × tensorwise, same loss |"
    assert headings in h100 and headings in h200
    assert cells(h200, "mxfp8, own loss, graphs")[-4:] == ["1.50", "", "1.20", "1.10"]
    # Blockwise FP8 was not measured in graphs.
    assert cells(h100, "mxfp8, own loss, graphs")[-4:] == ["1.50", "", "1.20", "1.10"]
    assert cells(h100, "mxfp8, graphs")[-4:] == ["1.55", "", "1.24", "1.36"]
    assert cells(h100, steps.BF16 + ", graphs")[-4:] == ["1.00", "", "0.80", "0.88"]
    names = [line.split(" | ")[0].strip("| ") for line in h100.splitlines() if " (583) |" in line]
    graphs = [name.removesuffix(", graphs") for name in names if name.endswith(", graphs")]
    assert names == [f"{name}, graphs" for name in graphs] + list(SPEEDS)
    assert graphs == sorted(graphs, key=steps.ORDER.index) and len(graphs) == 8


def test_without_the_default_loss_rows_are_compared_with_bf16_of_the_same_loss(place):
    speeds = {f"{steps.BF16}, own loss": 1000, "mxfp8, own loss": 990, "nvfp4, own loss": 700}
    rows = [row("llama-1b", name, speed=speed) for name, speed in speeds.items()]
    (place / "flagship-h100-2.json").write_text(a_file("h100", rows))
    part = page(place).split("### The 1B: NVIDIA H100")[1].split("###")[0]
    assert "| GiB | × BF16, same loss |\n" in part
    assert cells(part, "nvfp4, own loss")[-1] == "0.70"


def test_the_first_table_compares_the_fastest_rows(place):
    """Rows without graphs, and Megatron-LM with the loss of this project, do not count."""
    speeds = {f"{steps.BF16}, own loss": 800, "mxfp8, own loss": 1000, "fp8-tile": 960}
    rows = [row("llama-1b", name, speed=speed) for name, speed in speeds.items()]
    rows += [row("llama-1b", "fp8-tile", True, 1200)]
    (place / "flagship-h100-2.json").write_text(a_file("h100", rows))
    runs = [{"name": "bf16", "seed": 1, "loss": 2.0}, {"name": "mxfp8", "seed": 1, "loss": 2.02}]
    (place / "leaderboard.json").write_text(json.dumps(runs))
    text = page(place)
    assert "|  | The 1B | The 8B | loss gap |" in text
    assert cells(text, steps.TENSORWISE) == ["", "1.25 / 1.25", ""]
    mxfp8 = "[`mxfp8`](recipes/mxfp8.md#mxfp8)"
    assert cells(text, mxfp8) == ["1.25 / –", "1.50 / 1.50", "+1.00%"]
    assert cells(text, f"{mxfp8} with its output layer") == ["", "2.00 / 2.00", ""]
    assert cells(text, "[`fp8-tile`](recipes/fp8.md#fp8-tile)") == ["1.50 / –", "", ""]


def test_memory_is_relative_to_megatron_lm_bf16(place):
    assert "## Memory" not in page(place)
    rows = [row("llama-8b", name, True, peak_gib=gib)
            for name, gib in ((steps.BF16, 58.72), ("mxfp8, own loss", 56.5),
                              (f"{steps.BF16}, own loss", 57.25))]  # fmt: skip
    file = json.loads(a_file("h200", rows))
    file["machine"]["commit"] = "abcdef0123456789"
    (place / "peak_memory-h200.json").write_text(json.dumps(file))
    text = page(place).partition("## Memory")[2]
    assert cells(text, steps.BF16) == ["58.7", "+0.0"]
    assert cells(text, "mxfp8, own loss") == ["56.5", "-2.2"]
    assert text.index("| mxfp8") < text.index(f"| {steps.BF16}")
    readme = " ".join((place / "README.md").read_text().split())
    assert "need 56.5 GiB under `mxfp8` and 57.2 in BF16 (" in readme


def test_captions_have_a_figure_for_each_gpu(place):
    text = page(place)
    for shown in (text, (place / "README.md").read_text()):
        caption = " ".join(shown.split())
        assert (
            "On one NVIDIA H100, `mxfp8` trains 1.50 times as fast as Megatron-LM BF16" in caption
        )
        assert "and 1.20 times as fast as Megatron-LM tensorwise FP8" in caption
        assert "; on one NVIDIA H200, 1.50 and 1.20 times as fast. These are" in caption


def test_readme_s_table_has_the_speeds_and_the_gap_of_each_recommended_recipe(place):
    page(place)
    readme = (place / "README.md").read_text()
    use = results.RECOMMENDED["mxfp8"]
    first = "[`mxfp8`](docs/recipes/mxfp8.md#mxfp8)"
    ratios = ["1.50 / 1.50", "– / –", "1.20 / 1.20", "1.10 / 1.10"]
    assert cells(readme, first) == [use, *ratios, "not measured"]
    assert cells(readme, f"{first} with its output layer")[1] == "2.00 / 2.00"
    runs = [
        {"name": name, "seed": seed, "loss": loss}
        for name, loss in (("bf16", 2.0), ("mxfp8", 2.02)) for seed in (1, 2)
    ]  # fmt: skip
    (place / "leaderboard.json").write_text(json.dumps(runs))
    page(place)
    readme = (place / "README.md").read_text()
    assert cells(readme, first)[-1] == "+1.00% ± 0.00"
    first = "[`nvfp4`](docs/recipes/nvfp4.md#nvfp4)"
    assert cells(readme, first)[1:] == ["– / –"] * 4 + ["not measured"]
    assert "| × BF16 | same kernel | × FP8 | same kernel | loss gap |" in readme


def test_bars_have_ratios(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: drawn.append(figure))
    first = results.Bars("A", {"a": 100, "b": 1250}, {"a": [1.0, None], "b": [12.5, 1.25]})
    second = results.Bars("B", {"b": 75}, {"b": [1.0, 1.0]})
    results.draw_steps([first, second], ("× a", "× c"), tmp_path / "a.png")
    left, right = drawn[0].axes
    assert [text.get_text().strip() for text in left.texts] == [
        "100 (1.00×, –)", "1,250 (12.50×, 1.25×)",
    ]  # fmt: skip
    assert [text.get_text().strip() for text in right.texts] == [
        "not measured",
        "75 (1.00×, 1.00×)",
    ]
    assert (left.get_title(), right.get_title()) == ("A", "B")
    assert drawn[0].get_supxlabel() == "tokens/s (× a, × c)"


def test_where_the_time_goes(place):
    """Also of rows that lack a kind, with each row's own commit."""
    head = {"commit": "abcdef0123456789"}
    row = head | {"case": "llama-8b fp8-tile", "milliseconds": {"busy": 500.5, "GEMMs": 200.25}}
    rows = [row, {"case": "llama-8b mxfp8", "error": "RuntimeError: out of memory"}]
    rows += [{
        "case": "llama-8b nvfp4", "commit": "0" * 16,
        "milliseconds": {"busy": 1.5, "loss": 2.5, "GEMMs": 3.5},
    }]  # fmt: skip
    times = {"machine": {"gpu": "NVIDIA H100"}, "rows": rows}
    (place / "gpu-time-h100.json").write_text(json.dumps(times))
    text = page(place).partition("### GPU time by kind of kernel: NVIDIA H100")[2]
    assert "gpu_time --only 'llama-8b fp8-tile' 'llama-8b nvfp4' --output" in text
    assert cells(text, "llama-8b fp8-tile") == ["abcdef0", "500", "200", ""]
    assert cells(text, "llama-8b nvfp4") == ["0000000", "1.50", "3.50", "2.50"]


def test_rows_of_two_processes_are_one_table(place):
    """A row that ended well is not replaced by an error of another file."""
    rows = [row("llama-8b", "fp8-tile", error="lost"), row("llama-1b", steps.BF16, speed=7)]
    (place / "flagship-h100-1.json").write_text(a_file("h100", rows))
    found = steps.read_steps(place, "h100").rows
    assert found["llama-8b", "fp8-tile", False]["tokens_per_s"] == 1200
    assert "error" not in found["llama-1b", steps.BF16, False]


def test_the_page_says_what_is_missing(place):
    (place / "flagship-h200.json").unlink()
    text = page(place)
    assert "one H200\n\nNot measured: run `python -m benchmarks flagship --output" in text
    assert (place / "docs" / "images" / "results.png").exists()
    assert "`mxfp8` trains 1.50 times" in (place / "README.md").read_text()


def test_errors_leave_no_page(place):
    file = place / "flagship-h200.json"
    text = file.read_text()
    file.write_text(text.replace("NVIDIA H200", "none"))
    with pytest.raises(SystemExit, match=r"flagship-h200\.json: measured on none"):
        page(place)
    file.write_text(a_file("h200", [row("llama-8b", "fp8-tile", error="lost")]))
    with pytest.raises(SystemExit, match="no case ended well"):
        page(place)
    file.write_text(text)
    (place / "flagship-h100.json").unlink()
    with pytest.raises(
        SystemExit, match=r"flagship-h100\.json: README's .*; python -m benchmarks "
    ):
        page(place)
    assert not (place / "docs" / "results.md").exists()
