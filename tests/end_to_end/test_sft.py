"""Training on conversations: the command of docs/finetune-and-serve.md, on a tiny Llama."""

import json
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_run import ROOT, Result, done, losses, refused, start_from, steps
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_lowbit.conversion.convert import to_megatron
from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.megatron import pretrain

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
SIZES = {
    "--seq-length": "64", "--micro-batch-size": "2", "--global-batch-size": "4", "--lr": "1e-2",
    "--train-iters": "4", "--eval-interval": "4", "--eval-iters": "1", "--save-interval": "2",
    "--split": "80,20,0",
}  # fmt: skip
"""Sizes in place of the page's."""


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


CHATS = [
    chat("What is two and two?", "Four.", "And three and three?", "Six, of course."),
    chat("Say nothing.", "No."),
    chat("Name a color that is not blue", "Red"),
    chat("Count", "one two three four five"),
    chat("Who is it?", "It is I."),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with MODEL, a Llama with a chat template, its checkpoint ``start``, and CHATS."""
    folder = tmp_path_factory.mktemp("sft")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([json.dumps(CHATS)], 300, special_tokens=["<|im_start|>", "<|im_end|>"])
    # Its pad is the end of an answer, as many models have it: the end must be learned.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "MODEL")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.1, rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "MODEL")
    to_megatron(folder / "MODEL", folder / "start")
    write_chats(folder / "CHATS", CHATS)
    return folder


def write_chats(path: Path, chats: list) -> None:
    lines = [json.dumps({"messages": messages}) for messages in chats]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def train(folder, capsys, monkeypatch):
    """Function that runs the page's command with other sizes, and with further arguments."""
    monkeypatch.chdir(folder)
    text = (ROOT / "docs" / "finetune-and-serve.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    lowbit-pretrain .*--sft(?:.*\\\n)+.*$", text, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))[1:]
    for option, value in SIZES.items():
        words[words.index(option) + 1] = value
    words += ["--num-workers", "0", "--quantization-engine", "reference", "--log-interval", "1"]

    def run(*arguments: object, without: str = "") -> Result:
        line = [*filter(lambda word: word != without, words), *map(str, arguments)]
        with pytest.raises(SystemExit) as ended:
            exit_on_user_error(partial(pretrain.main, line))
        captured = capsys.readouterr()
        return Result(ended.value.code, captured.out, captured.err)

    return run


def answer_losses(folder: Path, model: torch.nn.Module, messages: list) -> torch.Tensor:
    """Return the cross entropy of each token that answers, only from transformers and torch."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "MODEL")
    tokens, is_answer = [], []
    for message in messages:
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
        body = tokenizer.encode(f"{message['content']}<|im_end|>\n")
        tokens += head + body
        is_answer += [False] * len(head) + [message["role"] == "assistant"] * len(body)
    logits = model(torch.tensor([tokens])).logits[0]
    found = functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
    return found[torch.tensor(is_answer[1:])]


def gradient_norm(model: torch.nn.Module, loss: torch.Tensor) -> float:
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def test_loss_and_gradient_are_those_of_the_answers(train, folder, tmp_path):
    """The gradient belongs to two micro batches' means, or to the mean over all tokens."""
    model = LlamaForCausalLM.from_pretrained(folder / "MODEL")
    each = [answer_losses(folder, model, messages) for messages in CHATS[:4]]
    of_microbatches = (torch.cat(each[:2]).mean() + torch.cat(each[2:]).mean()) / 2
    of_tokens = torch.cat(each).mean()
    norms = [gradient_norm(model, loss) for loss in (of_microbatches, of_tokens)]
    assert abs(norms[0] / norms[1] - 1) > 1e-2
    for norm, flags in zip(norms, [(), ("--calculate-per-token-loss",)], strict=True):
        save = tmp_path / str(len(flags))
        result = train("--save", save, "--train-iters", 1, "--precision-recipe", "bf16", *flags)
        done(result)
        assert "--sft: CHATS has 5 conversations, one per sequence" in result.stdout
        # FP32 sums in another order. Megatron-LM logs the mean over all tokens in either case.
        assert steps(save)[1] == pytest.approx((of_tokens.item(), norm), rel=1e-5)


def test_a_recipe_learns_and_a_resumed_run_repeats_it(train, tmp_path):
    """The four conversations come in every step: the loss falls."""
    result = train("--save", tmp_path / "whole")
    done(result)
    assert "recipe qat-nvfp4" in result.stdout and "validation loss" in result.stdout
    whole = losses(tmp_path / "whole")
    assert whole[4] < whole[1] - 1
    (tmp_path / "part").mkdir()
    part = start_from(tmp_path / "whole", 2, tmp_path / "part")
    done(train("--load", part, "--save", part, without="--finetune"))
    assert losses(part) == {step: whole[step] for step in (3, 4)}


def test_a_bad_file_is_refused(train, folder, tmp_path):
    write_chats(tmp_path / "bad.jsonl", [*CHATS, [{"role": "user", "content": "Alone"}]])
    message = refused(train("--data-path", tmp_path / "bad.jsonl"))
    assert message == (
        f"error: {tmp_path}/bad.jsonl:6: a conversation without a message of the assistant"
    )
