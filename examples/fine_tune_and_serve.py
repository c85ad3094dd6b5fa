"""Fine-tune a tiny Llama with quantized weights, and compare two engines that serve it.

    python examples/fine_tune_and_serve.py FOLDER
    python examples/fine_tune_and_serve.py FOLDER --recipe qat-mxfp4

The commands of docs/finetune-and-serve.md run with a random model, a page of text and small sizes,
in about a minute on a CPU. Then the logits of transformers and of llama.cpp are compared with the
trainer's. It needs llama.cpp: pip install '.[serve]'
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from megatron_lowbit.conversion.megatron_model import loaded_model
from megatron_lowbit.recipes import load_recipe

COMMANDS = """
lowbit-convert to-megatron MODEL start
lowbit-preprocess --input TEXT --tokenizer-model start/hugging_face --output-prefix text
lowbit-pretrain @start/model.args --load start --finetune --precision-recipe RECIPE \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model start/hugging_face --data-path text \
    --split 70,30,0 --seq-length 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 6 \
    --lr 1e-3 --eval-interval 6 --eval-iters 1 --eval-precision recipe --save tuned \
    --save-interval 100
lowbit-convert to-hugging-face tuned served --quantized compressed-tensors \
    --carry start/hugging_face
lowbit-convert to-gguf served served.gguf
"""
SERVER = """
import os, sys
from xllamacpp import CommonParams, Server, ggml_type, llama_flash_attn_type
parameters = CommonParams()
parameters.model.path, parameters.n_ctx = sys.argv[1], 256
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
parameters.n_parallel, parameters.verbosity = 1, 0
parameters.cache_type_k = parameters.cache_type_v = ggml_type.GGML_TYPE_F32
parameters.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = Server(parameters)
print(server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
"""
TEXT = Path(__file__).parents[1] / "docs" / "write-a-recipe.md"
PROMPT = "A recipe is a file that says how each operand is quantized."
VOCABULARY = 384
TRANSFORMERS_BOUND, LLAMA_CPP_BOUND = 1 / 64, 1 / 32
"""Of BF16 in all of transformers' model, and of 8-bit integers that llama.cpp rounds inputs to."""


def write_inputs(folder: Path) -> None:
    """Write MODEL, a random Llama with a tokenizer, and TEXT, the parts of a page."""
    text = TEXT.read_text(encoding="utf-8")
    if (folder / "TEXT").exists():
        raise SystemExit(f"error: {folder}: exists; give a new folder")
    (folder / "TEXT").mkdir(parents=True)
    for number, part in enumerate(text.split("\n## ")):
        (folder / "TEXT" / f"{number}.txt").write_text(part * 4, encoding="utf-8")
    pairs = ByteLevelBPETokenizer()
    pairs.train_from_iterator([text], VOCABULARY, special_tokens=["<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pairs._tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder / "MODEL")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.1, rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "MODEL")


def run_commands(folder: Path, recipe: str) -> None:
    """Run the commands in a folder; each is a script next to Python's."""
    for line in COMMANDS.replace("RECIPE", recipe).strip().splitlines():
        print(f"\n$ {line}", flush=True)
        command, *arguments = shlex.split(line)
        subprocess.run(
            [Path(sys.executable).with_name(command), *arguments], cwd=folder, check=True
        )


def trainer_logits(folder: Path, tokens: Tensor, recipe: str) -> Tensor:
    """Return the logits (tokens, vocabulary) of Megatron-LM's model, evaluated by a recipe."""
    arguments = [
        *shlex.split((folder / "start" / "model.args").read_text(), comments=True),
        "--padded-vocab-size", str(VOCABULARY), "--seq-length", str(tokens.shape[1]),
        "--quantization-engine", "reference", "--eval-precision", "recipe",
    ]  # fmt: skip
    positions = torch.arange(tokens.shape[1])[None]
    with loaded_model(folder / "tuned", arguments, load_recipe(recipe)) as model, torch.no_grad():
        return model(tokens, positions, attention_mask=None).float()[0]


def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits (tokens, vocabulary) of a folder, whose weights become BF16 matrices."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    with torch.no_grad():
        return model(tokens).logits.float()[0]


@contextmanager
def llama_cpp_server(file: Path) -> Iterator[str]:
    """Start a server of a file on one thread, and yield its address.

    Keys and values are kept in FP32. The server is a process of its own, killed or left by
    ``os._exit``: its destructor may wait for its thread without end.
    """
    command = [sys.executable, "-c", SERVER, str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def answer(address: str, path: str, question: dict) -> dict:
    """Return a server's answer."""
    with urlopen(Request(f"{address}/{path}", json.dumps(question).encode()), timeout=60) as reply:
        return json.load(reply)


def llama_cpp_logits(file: Path, tokens: list[int], size: int, visible: int) -> Tensor:
    """Return the logarithms of llama.cpp's probabilities (tokens, size), of each prefix of a text.

    ``visible`` is any token that is text by itself: it is chosen as the answer, since llama.cpp
    gives no probabilities with half a character, and leaves the probabilities as they are.
    """
    result = torch.full((len(tokens), size), math.nan)
    with llama_cpp_server(file) as address:
        for last in range(len(tokens)):
            question = {
                "prompt": tokens[: last + 1], "n_predict": 1, "n_probs": size, "temperature": 0,
                "logit_bias": [[visible, 1000.0]], "cache_prompt": False,
            }  # fmt: skip
            (chosen,) = answer(address, "completions", question)["completion_probabilities"]
            for entry in chosen["top_logprobs"]:
                result[last, entry["id"]] = entry["logprob"]
    assert result.isfinite().all(), "llama.cpp returned fewer probabilities than tokens"
    return result


def difference(logits: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of logits over their norm, both without their mean.

    The mean of a token's logits has no effect on its probabilities, which are all that a server
    tells.
    """
    logits, expected = (one - one.mean(dim=-1, keepdim=True) for one in (logits, expected))
    return float((logits - expected).norm() / expected.norm())


def main() -> None:
    """Train, export, and print how far the logits of both engines are from the trainer's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--recipe", default="qat-nvfp4", help="qat-nvfp4, qat-mxfp4, qat-int4-g32")
    args = parser.parse_args()
    write_inputs(args.folder)
    run_commands(args.folder, args.recipe)
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "served")
    tokens = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    ours, unquantized = (trainer_logits(args.folder, tokens, r) for r in (args.recipe, "bf16"))
    theirs = {
        "transformers": transformers_logits(args.folder / "served", tokens),
        "llama.cpp": llama_cpp_logits(
            args.folder / "served.gguf", tokens[0].tolist(), VOCABULARY,
            tokenizer.convert_tokens_to_ids("a"),
        ),
        "unquantized": unquantized,
    }  # fmt: skip
    print(f"\n{args.recipe}: norm of the difference of logits, over the trainer's")
    seen = {name: difference(logits, ours) for name, logits in theirs.items()}
    print("\n".join(f"{name:14}{value:.4f}" for name, value in seen.items()))
    assert seen["transformers"] <= TRANSFORMERS_BOUND and seen["llama.cpp"] <= LLAMA_CPP_BOUND


if __name__ == "__main__":
    main()
