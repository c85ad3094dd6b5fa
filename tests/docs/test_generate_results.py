"""The page of results: figures against numbers computed by hand, and what is refused."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import results
from matplotlib.figure import Figure

SPEEDS = {
    results.BF16: 1000,
    results.OWN_FP8: 800,
    "fp8-tile": 1200,
    "nvfp4": 900,
    "quartet2": 700,
}


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
def place(tmp_path):
    """A folder of results with a file of each GPU, and a root with an own README."""
    (tmp_path / "docs" / "images").mkdir(parents=True)
    (tmp_path / "README.md").write_text("a\n\n<!-- results: made -->\n\n<!-- /results -->\n\nb\n")
    rows = [row("llama-8b", name, speed=speed) for name, speed in SPEEDS.items()]
    rows += [row("llama-8b", results.BF16, True, 1100), row("llama-8b", "fp8-tile", True, 1650)]
    rows += [row("llama-1b", results.BF16, error="RuntimeError: out of memory")]
    for kind in results.KINDS:
        (tmp_path / f"flagship-{kind}.json").write_text(a_file(kind, rows))
    return tmp_path


@pytest.fixture
def study(tmp_path):
    """Function that writes a finished run, of 4 validations, and returns the study's folder."""

    def finished(name: str, loss: float, seed: int = 1) -> Path:
        folder = tmp_path / "runs" / f"{name}-{seed}"
        folder.mkdir(parents=True)
        command = ["-P", "-c", "from megatron_lowbit.commands import pretrain; pretrain()",
                   "@examples/gpt-345m.args", "--precision-recipe", name,
                   "--data-path", "elsewhere", "--seed", str(seed)]  # fmt: skip
        machine = {"gpu": "NVIDIA H100", "torch": "2.11", "commit": "abc"}
        state = {"name": name, "seed": seed, "command": command, "finished": True}
        (folder / "study.json").write_text(json.dumps(state | {"machine": machine}))
        lines = []
        for i in range(1, 101):
            line = {"iteration": i, "lm_loss": loss, "consumed_tokens": 7200 * i}
            line |= {"tokens_per_second": 100.0} if i > 1 else {}
            line |= {"validation_loss": loss + 1 / i} if i % 25 == 0 else {}
            lines.append(json.dumps(line) + "\n")
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder.parent

    return finished


def page(place: Path, *folders: Path) -> str:
    results.main([*map(str, folders), "--results", str(place), "--root", str(place)])
    return (place / "docs" / "results.md").read_text()


def cells(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_steps_are_compared_on_their_machine(place, study):
    study("bf16", 2.0)
    text = page(place, study("fp8-tile", 2.02))
    h100, h200 = text.split("## Whole training steps on one ")[1:]
    assert h100.startswith("NVIDIA H100") and h200.startswith("NVIDIA H200")
    assert cells(h100, "fp8-tile") == ["612 (583)", "1,200", "300", "30.4%", "61.2", "1.20", "1.50"]
    assert cells(h100, results.BF16)[-2:] == ["1.00", "1.25"]
    # With graphs, beside BF16 with graphs; blockwise FP8 was not measured there.
    assert cells(h100, "fp8-tile, graphs")[-2:] == ["1.50", ""]
    assert "Slower than Megatron-LM FP8 blockwise: llama-8b quartet2 (0.88)." in h100
    assert "BF16: llama-8b nvfp4 (0.90), llama-8b quartet2 (0.70)." in h100
    assert "- llama-1b Megatron-LM BF16: RuntimeError: out of memory" in h100
    assert "torchrun pretrain_gpt.py --precision-recipe fp8-tile" in h100


def test_ratios_are_to_rows_of_the_same_loss(place):
    """A second file's rows stand in the order in which cases are declared."""
    liger = {results.BF16: 2000, results.TENSORWISE: 2500, "fp8-tile": 3000}
    rows = [row("llama-8b", f"{name}, Liger loss", speed=speed) for name, speed in liger.items()]
    rows += [row("llama-8b", f"{results.TENSORWISE}, native fused loss", speed=1800)]
    rows += [row("llama-8b", results.TENSORWISE, speed=1600)]
    (place / "flagship-h100-2.json").write_text(a_file("h100", rows))
    h100, h200 = page(place).split("## Whole training steps on one ")[1:]
    assert "| × BF16 | × blockwise | × tensorwise |" in h100 and "× tensorwise" not in h200
    assert cells(h100, "fp8-tile")[-3:] == ["1.20", "1.50", "0.75"]
    assert cells(h100, "fp8-tile, Liger loss")[-3:] == ["1.50", "", "1.20"]
    assert cells(h100, results.TENSORWISE + ", Liger loss")[-3:] == ["1.25", "", "1.00"]
    assert cells(h100, results.TENSORWISE + ", native fused loss")[-3:] == ["", "", "1.00"]
    assert "Slower than Megatron-LM FP8 tensorwise: llama-8b fp8-tile (0.75)" in h100
    names = [line.split(" | ")[0].strip("| ") for line in h100.splitlines() if " (583) |" in line]
    declared = [name for name in results.ORDER if name in names]
    assert names[: len(declared)] == declared and len(declared) == 9
    assert '"Liger loss"' in h100 and '"Liger loss"' not in h200
    assert "compare rows of the same loss" in (place / "README.md").read_text()


def test_bars_have_ratios_to_both_bases(tmp_path, monkeypatch):
    """Shown as far as a model has them: a dash where only the same loss is missing."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: drawn.append(figure))
    both = {"BF16": 100, "FP8 tensorwise": 125}
    both = {f"Megatron-LM {name}": speed for name, speed in both.items()} | {"fp8-tile": 150}
    speeds = {"a": both | {"fp8-tile, Liger loss": 300}, "b": {results.BF16: 50, "fp8-tile": 75}}
    results.draw_summary(speeds, {}, (results.BF16, results.TENSORWISE), tmp_path / "a.png")
    left, right = drawn[0].axes
    assert [text.get_text().strip() for text in left.texts] == [
        "100", "125 (1.25×, 1.00×)", "150 (1.50×, 1.20×)", "300 (–, –)",
    ]  # fmt: skip
    assert left.get_xlabel() == "tokens/s (× BF16, × FP8 tensorwise)"
    assert [text.get_text().strip() for text in right.texts][::2] == ["50", "75 (1.50×)"]
    assert right.get_xlabel() == "tokens/s (× BF16)"


def test_where_the_time_goes(place):
    """Also in a file that has rows of an earlier version, without some kinds."""
    row = {"case": "llama-8b fp8-tile", "milliseconds": {"busy": 500.5, "GEMMs": 200.25}}
    rows = [row, {"case": "llama-8b nvfp4", "error": "RuntimeError: out of memory"}]
    machine = {"gpu": "NVIDIA H100", "commit": "abcdef0123456789"}
    (place / "gpu-time-h100.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    text = page(place).partition("### GPU time by kind of kernel: NVIDIA H100")[2]
    assert "gpu_time --only 'llama-8b fp8-tile' --output" in text
    assert cells(text, "llama-8b fp8-tile") == ["612", "500", "200"]
    assert "Commit abcdef012345." in text and "`nocast`" in text
    rows[1] = {"case": "llama-8b nvfp4", "milliseconds": {"busy": 1.5, "loss": 2.5, "GEMMs": 3.5}}
    (place / "gpu-time-h100.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    text = page(place).partition("### GPU time by kind of kernel: NVIDIA H100")[2]
    assert cells(text, "llama-8b fp8-tile") == ["612", "500", "200", ""]
    assert cells(text, "llama-8b nvfp4") == ["612", "1.50", "3.50", "2.50"]
    assert "`nocast`" not in text


def test_longer_runs(place, study):
    study("fp8-tile", 2.02)
    whole = page(place, study("bf16", 2.0))
    text = whole.partition("## Longer runs")[2]
    minutes = 7200 * 100 / 100 / 60
    assert "\n\n    lowbit-study run examples/studies/flagship.yaml" in text
    perplexity = f"{math.exp(2.01):.3f}"
    assert cells(text, "bf16") == ["2.0000", "", perplexity, "100", f"{minutes:.1f}"]
    assert cells(text, "fp8-tile")[:3] == ["2.0200", "+1.00%", f"{math.exp(2.03):.3f}"]
    assert "[examples/gpt-345m.args](../examples/gpt-345m.args), 0.72M tokens, 1 seed each" in text
    [command] = re.findall("^lowbit-pretrain .*fp8-tile.*$", text, re.MULTILINE)
    assert shlex.split(command) == [
        "lowbit-pretrain", "@examples/gpt-345m.args", "--precision-recipe", "fp8-tile",
        "--seed", "1",
        "--data-path", "data/linux", "--tokenizer-model", "data/linux-tokenizer",
        "--save", "runs/fp8-tile",
    ]  # fmt: skip
    kept = json.loads((place / "flagship-runs.json").read_text())
    assert kept[0]["validation"][0] == [180_000, 2.04] and kept[0]["tokens_per_s"] == 100
    assert page(place) == whole  # from the file alone


def test_pictures(place, study):
    """README has gaps once there are two seeds."""
    study("bf16", 2.0)
    page(place, study("nvfp4", 2.1))
    assert "Right:" not in (place / "README.md").read_text()
    study("bf16", 2.02, seed=2)
    text = page(place, study("nvfp4", 2.1, seed=2)).partition("## Longer runs")[2]
    gaps = 0.1 / 2.0, 0.08 / 2.02
    gap, error = 100 * sum(gaps) / 2, 100 * (gaps[0] - gaps[1]) / 2
    assert cells(text, "nvfp4")[:2] == ["2.1000", f"{gap:+.2f}% ± {error:.2f}"]
    assert "with its standard error over 2\nseeds." in (place / "README.md").read_text()
    for name in ("results.png", "results-runs.png"):
        assert (place / "docs" / "images" / name).read_bytes().startswith(b"\x89PNG")
    readme = (place / "README.md").read_text()
    assert "(docs/images/results.png)" in readme and "on one NVIDIA H100, with" in readme
    found = results.read_steps(place, "h100")
    assert found.speeds("llama-8b") == SPEEDS | {results.BF16: 1100, "fp8-tile": 1650}


def test_rows_of_two_processes_are_one_table(place):
    """A row that ended well is not replaced by an error of another file."""
    rows = [row("llama-8b", "fp8-tile", error="lost"), row("llama-1b", results.BF16, speed=7)]
    (place / "flagship-h100-1.json").write_text(a_file("h100", rows))
    found = results.read_steps(place, "h100").rows
    assert found["llama-8b", "fp8-tile", False]["tokens_per_s"] == 1200
    assert "error" not in found["llama-1b", results.BF16, False]


def test_the_page_says_what_is_missing(place):
    (place / "flagship-h200.json").unlink()
    text = page(place)
    assert "one H200\n\nNot measured: `python -m benchmarks flagship --output benchmarks" in text
    assert text.partition("## Longer runs")[2].strip().startswith("Not run yet:")
    assert not (place / "flagship-runs.json").exists()
    assert "Right:" not in (place / "README.md").read_text()
    assert (place / "docs" / "images" / "results.png").exists()


def test_errors_leave_no_page(place, study):
    folder = study("bf16", 2.0)
    file = place / "flagship-h200.json"
    text = file.read_text()
    file.write_text(text.replace("NVIDIA H200", "none"))
    with pytest.raises(SystemExit, match=r"flagship-h200\.json: measured on none"):
        page(place, folder)
    file.write_text(a_file("h200", [row("llama-8b", "fp8-tile", error="lost")]))
    with pytest.raises(SystemExit, match="no case ended well"):
        page(place, folder)
    file.write_text(text)
    study("other", 2.0)
    with pytest.raises(SystemExit, match=r"other: no run of examples/studies/flagship\.yaml"):
        page(place, folder)
    (place / "flagship-h100.json").unlink()
    with pytest.raises(SystemExit, match=r"flagship-h100\.json: is missing; python -m benchmarks "):
        page(place)
    assert not (place / "docs" / "results.md").exists()
    assert not (place / "flagship-runs.json").exists()
