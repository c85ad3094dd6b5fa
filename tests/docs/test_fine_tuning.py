"""The commands of docs/finetune-and-serve.md, as examples/fine_tune_and_serve.py runs them."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("xllamacpp")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "fine_tune_and_serve.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SIZES = {
    "--seq-length", "--global-batch-size", "--train-iters", "--lr", "--eval-interval",
    "--eval-iters", "--split", "--precision-recipe",
}  # fmt: skip
"""Arguments of which the page and the example have different values."""
FIGURE = re.compile(r"^(transformers|llama\.cpp|unquantized) +([\d.]+)$", re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Split into commands and words, without the sizes."""
    lines = [shlex.split(line) for line in text.replace("\\\n", " ").strip().splitlines()]
    return [
        [word for before, word in zip(["", *words], words, strict=False) if before not in SIZES]
        for words in lines
    ]


def test_the_example_runs_the_page_s_commands():
    page = (ROOT / "docs" / "finetune-and-serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    example = runpy.run_path(str(SCRIPT))
    expected = commands(block)
    actual = commands(example["COMMANDS"])
    assert [words[:2] for words in actual] == [words[:2] for words in expected]
    assert [sorted(words) for words in actual] == [sorted(words) for words in expected]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> tuple[Path, str]:
    """Folder and output of the example."""
    folder = tmp_path_factory.mktemp("fine-tuning") / "example"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True,
        env=ENVIRONMENT, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return folder, result.stdout


@pytest.mark.slow
def test_engines_serve_what_was_trained(served):
    """Logits are near the trainer's, and far from the logits of unquantized weights."""
    _, output = served
    assert "recipe qat-nvfp4" in output and "validation loss" in output
    seen = {name: float(value) for name, value in FIGURE.findall(output)}
    assert 0 < seen["transformers"] <= 1 / 64 and 0 < seen["llama.cpp"] <= 1 / 32
    assert seen["unquantized"] >= 4 * max(seen["transformers"], seen["llama.cpp"])


@pytest.mark.slow
def test_training_changed_the_model(served):
    """Codes of the served weights differ from the model that training began with."""
    from safetensors.torch import load_file

    folder, _ = served
    words = [
        "lowbit-convert", "to-hugging-face", "start", "at-once", "--quantized",
        "compressed-tensors", "--recipe", "qat-nvfp4",
    ]  # fmt: skip
    command = [Path(sys.executable).with_name(words[0]), *words[1:]]
    subprocess.run(command, cwd=folder, check=True, env=ENVIRONMENT, capture_output=True)
    before, after = (
        load_file(folder / path / "model.safetensors") for path in ("at-once", "served")
    )
    assert before.keys() == after.keys()
    name = "model.layers.1.mlp.down_proj.weight_packed"
    assert not torch.equal(before[name], after[name])
