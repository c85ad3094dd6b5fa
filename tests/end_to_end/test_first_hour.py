"""The first hour of a user, with the installed wheel: text, recipe, comparison, transformers."""

import re
import sysconfig
from pathlib import Path

import pytest

RECIPE = """\
name: mine
description: NVFP4 in the MLPs of all blocks but the last
configs:
  low:
    input: {format: nvfp4}
    weight: {format: nvfp4-2d}
    grad: {format: nvfp4, rounding: stochastic}
    wgrad: {hadamard: {size: 16, signs: fixed, output: bf16}}
  high: {}
matchers:
  end: {type: blocks, last: 1, config: high, enabled: true}
  mlps: {type: glob, pattern: "*.mlp.*", config: low, enabled: true}
"""
GENERATE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
prompt = tokenizer("import ", return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
print(type(model).__name__, answer.shape[1] - prompt["input_ids"].shape[1])
"""


def own_text() -> str:
    """Return 1 MB of text: source of Python's standard library, files after one another."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n\n\n".join(file.read_text(encoding="utf-8") for file in files)[:1_000_000]


@pytest.mark.slow
def test_first_hour(installed, tmp_path):
    """Prepare text, compare two recipes over two seeds, and load a run's model in transformers."""
    (tmp_path / "mine.txt").write_text(own_text())
    (tmp_path / "mine.yaml").write_text(RECIPE)

    def lowbit(line: str) -> str:
        return installed(*f"lowbit-{line}".split())

    output = lowbit("tokenizer --input mine.txt --vocab-size 1024 --output tokenizer")
    assert "1,024 tokens" in output
    output = lowbit("preprocess --input mine.txt --tokenizer-model tokenizer --output-prefix data")
    documents, tokens = re.search(r"data: ([\d,]+) documents, ([\d,]+) tokens", output).groups()
    assert int(documents.replace(",", "")) >= 50 and int(tokens.replace(",", "")) >= 200_000
    output = lowbit("recipes show mine.yaml --model examples/llama3-tiny.args")
    assert "recipe mine: 6 of 16 linear layers quantized" in output

    output = lowbit(
        "study run --recipes bf16 mine.yaml --seeds 1 2 --output compared --keep-checkpoints "
        "-- @examples/llama3-tiny.args --eval-iters 2 --data-path data --tokenizer-model tokenizer"
    )
    rows = [line for line in output.splitlines() if re.search(r"\b(bf16|mine) │ 2 ", line)]
    assert len(rows) == 2
    losses = [float(re.search(r"(\d+\.\d+) ±", row)[1]) for row in rows]
    assert max(losses) < 6.5  # 6.93 is the loss of guessing among 1024 tokens
    gap = float(re.search(r"([+-]\d+\.\d+)% ± \d", rows[1])[1])
    assert abs(gap) < 3
    assert (tmp_path / "compared" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "compared" / "comparison.html").is_file()

    output = lowbit("convert to-hugging-face compared/mine-1 model --carry tokenizer --verify")
    assert "loads in: transformers" in output
    assert installed("python", "-c", GENERATE).splitlines()[-1] == "LlamaForCausalLM 8"
