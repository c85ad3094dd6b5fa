"""The commands of docs/fine-tuning.md, taken from the page and run on a tiny Llama."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from megatron_lowbit.conversion.megatron_model import loaded_model
from megatron_lowbit.recipes import load_recipe

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
SMALLER = {
    "--seq-length": "32", "--global-batch-size": "2", "--train-iters": "6", "--lr": "1e-3",
    "--eval-interval": "6", "--eval-iters": "1", "--split": "70,30,0",
}  # fmt: skip
"""Sizes in place of the page's."""
VOCABULARY = 384


def page_commands() -> list[list[str]]:
    text = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


def run(folder: Path, words: list[str]) -> str:
    """Run a command of the project in a folder, with the sizes of this test; return its output."""
    module, _, function = SCRIPTS[words[0]].partition(":")
    for option, value in SMALLER.items():
        if option in words:
            words[words.index(option) + 1] = value
    code = f"import sys; from {module} import {function}; sys.argv[0] = {words[0]!r}; {function}()"
    result = subprocess.run(
        [sys.executable, "-c", code, *words[1:]], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with MODEL, a Llama with a tokenizer, and TEXT, after the page's commands."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("fine-tuning")
    text = (ROOT / "docs" / "recipe-files.md").read_text(encoding="utf-8")
    (folder / "TEXT").mkdir()
    for number, part in enumerate(text.split("\n## ")):
        (folder / "TEXT" / f"{number}.txt").write_text(part * 4, encoding="utf-8")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], VOCABULARY, special_tokens=["<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder / "MODEL")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            initializer_range=0.1, rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "MODEL")
    commands = page_commands()
    assert [words[0] for words in commands] == [
        "lowbit-convert", "lowbit-preprocess", "lowbit-pretrain", "lowbit-convert",
    ]  # fmt: skip
    outputs = [run(folder, words) for words in commands]
    assert "recipe qat-nvfp4" in outputs[2] and "validation loss" in outputs[2]
    assert "compressed-tensors" in outputs[3]
    return folder


@pytest.mark.slow
def test_transformers_serves_what_was_trained(folder):
    """Its logits are the trainer's in the recipe's precision, within the page's 1/64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    served = folder / "served"
    tokens = AutoTokenizer.from_pretrained(served)("A recipe is a file", return_tensors="pt")
    tokens = tokens["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(served, dtype="bfloat16")
    arguments = [
        *shlex.split((folder / "start" / "model.args").read_text(), comments=True),
        "--padded-vocab-size", str(VOCABULARY), "--seq-length", str(tokens.shape[1]),
        "--quantization-engine", "reference", "--eval-precision", "recipe",
    ]  # fmt: skip
    positions = torch.arange(tokens.shape[1])[None]

    def logits(recipe: str) -> torch.Tensor:
        with loaded_model(folder / "tuned", arguments, load_recipe(recipe)) as trained:
            return trained(tokens, positions, attention_mask=None).float()

    with torch.no_grad():
        theirs = model(tokens).logits.float()
        ours, unquantized = logits("qat-nvfp4"), logits("bf16")
    difference, effect = ((theirs - other).norm() / ours.norm() for other in (ours, unquantized))
    assert difference <= 1 / 64 and effect >= 2 * difference


@pytest.mark.slow
def test_training_changed_the_model(folder):
    """Codes of the served weights are not those of the model that it began with."""
    from safetensors.torch import load_file

    output = folder / "at once"
    convert = ["lowbit-convert", "to-hugging-face", "start", str(output), "--quantized"]
    run(folder, [*convert, "compressed-tensors", "--recipe", "qat-nvfp4"])
    before, after = (load_file(path / "model.safetensors") for path in (output, folder / "served"))
    assert before.keys() == after.keys()
    name = "model.layers.1.mlp.down_proj.weight_packed"
    assert not torch.equal(before[name], after[name])
