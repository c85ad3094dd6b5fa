"""Samples of ``--sft``: token ids, and the answers among them, by templates and formats."""

import json
import shlex

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from torch._utils import ExceptionWrapper
from transformers import PreTrainedTokenizerFast

from megatron_lowbit.errors import UserError

RUN = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 96
    --max-position-embeddings 96 --micro-batch-size 1 --train-iters 1 --lr 1 --sft
"""
HUGGING_FACE, SFT = "--tokenizer-type HuggingFaceTokenizer", "--tokenizer-type SFTTokenizer"
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"]
HEAD = "'<|im_start|>' + message['role'] + '\\n'"
ANSWER = "message['content'] + '<|im_end|>'"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = f"{{% for message in messages %}}{{{{ {HEAD} + {ANSWER} + '\\n' }}}}{{% endfor %}}{PROMPT}"
MARKED = (
    f"{{% for message in messages %}}{{{{ {HEAD} }}}}{{% if message['role'] == 'assistant' %}}"
    f"{{% generation %}}{{{{ {ANSWER} }}}}{{% endgeneration %}}{{% else %}}{{{{ {ANSWER} }}}}"
    "{% endif %}{{ '\\n' }}{% endfor %}" + PROMPT
)
THINKS = "('<think>' if loop.last and message['role'] == 'assistant' else '')"
THINKING = CHATML.replace(HEAD, f"{HEAD} + {THINKS}")
"""Template that formats the last answer in another way, as those of models that think."""
CHAT = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wörter?"},
    {"role": "assistant", "content": "\nÄpfel, €"}, {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Nothing"},
]  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path) -> PreTrainedTokenizerFast:
    """A tokenizer in the folder ``tokenizer``, whose pad is the end of an answer."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([json.dumps(CHAT), "\n\n\n\n"], 300, special_tokens=SPECIAL)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>",
        chat_template=CHATML,
    )  # fmt: skip
    made.save_pretrained(tmp_path / "tokenizer")
    return made


@pytest.fixture
def datasets(tmp_path, tokenizer, monkeypatch, build_datasets):
    """Function of a command line and conversations that returns the datasets."""
    monkeypatch.chdir(tmp_path)

    def build(line: str, *chats: list, samples: tuple = (6, 0, 0)) -> tuple:
        text = "\n".join(json.dumps({"messages": messages}) for messages in chats)
        (tmp_path / "chats.jsonl").write_text(text)
        data = "--tokenizer-model tokenizer --data-path chats.jsonl --split 1,0,0"
        return build_datasets(f"{RUN} {data} {line}", samples)

    return build


def pieces(sample: dict, tokenizer) -> list[str]:
    """Return the stretches of a sample's labels that have a loss, as text."""
    found, before = [], False
    for label, counts in zip(sample["labels"].tolist(), sample["loss_mask"].tolist(), strict=True):
        if counts and not before:
            found.append([])
        if counts:
            found[-1].append(label)
        before = bool(counts)
    return [tokenizer.decode(ids) for ids in found]


def with_template(template: str) -> str:
    return f"{HUGGING_FACE} --chat-template {shlex.quote(template)}"


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        (HUGGING_FACE, ["\nÄpfel, €<|im_end|>\n", "Nothing<|im_end|>\n"]),
        (with_template(MARKED), ["\nÄpfel, €<|im_end|>", "Nothing<|im_end|>"]),
        (f"{SFT} --sft-tokenizer-prompt-format nemotron-nano-v2",
         ["Äpfel, €\n<SPECIAL_12>\n", "Nothing\n<SPECIAL_12>\n"]),
    ],
)  # fmt: skip
def test_only_answers_have_a_loss(datasets, tokenizer, monkeypatch, line, answers):
    if "nemotron" in line:  # the prefix of an answer is three tokens there: a token for the word
        tokenizer.add_tokens(["Assistant"])
        tokenizer.save_pretrained("tokenizer")
    train, _, _ = datasets(line, CHAT)
    sample = train[0]
    assert pieces(sample, tokenizer) == answers
    assert torch.equal(sample["tokens"][1:][sample["loss_mask"][:-1] > 0],
                       sample["labels"][sample["loss_mask"] > 0])  # fmt: skip
    for name in ("tokens", "labels"):  # no id in them is outside of the vocabulary
        assert sample[name].min() >= 0 and sample[name].max() < len(tokenizer)


@pytest.mark.parametrize("mark", ["{%- generation %}", "{%+ generation -%}", "{%generation%}"])
def test_answers_are_marked_in_any_spelling_of_jinja(datasets, tokenizer, mark):
    train, _, _ = datasets(with_template(MARKED.replace("{% generation %}", mark)), CHAT)
    assert pieces(train[0], tokenizer) == ["\nÄpfel, €<|im_end|>", "Nothing<|im_end|>"]


def test_tokens_are_those_of_the_chat_template(datasets, tokenizer):
    sample = datasets(HUGGING_FACE, CHAT)[0][0]
    ids = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert sample["tokens"][: len(ids)].tolist() == ids
    assert len(sample["tokens"]) == len(sample["labels"]) == 96


def test_all_tokens_have_a_loss_in_the_default_format(datasets, tokenizer, capsys):
    train, _, _ = datasets(f"{SFT} --sft-tokenizer-prompt-format default", CHAT)
    text = tokenizer.decode(tokenizer.apply_chat_template(CHAT, return_dict=False)[1:])
    assert pieces(train[0], tokenizer) == [text]
    assert "--sft: the format default, all tokens in the loss\n" in capsys.readouterr().out


def test_a_conversation_is_a_sequence_and_all_come_again(datasets, tokenizer):
    short = [{"role": "system", "content": "S"}, *CHAT[3:]]
    train, _, _ = datasets(HUGGING_FACE, CHAT + short, CHAT[3:])
    assert len(train) == 6
    counts = [len(pieces(train[number], tokenizer)) for number in range(6)]
    assert counts == [2, 1, 1, 2, 1, 1]


def test_a_long_conversation_is_cut_off(datasets, tokenizer, capsys):
    line = f"{HUGGING_FACE} --seq-length"
    ids = tokenizer.apply_chat_template(CHAT, return_dict=False)
    train, _, _ = datasets(f"{line} {len(ids) - 4}", CHAT)
    assert pieces(train[0], tokenizer)[0] == "\nÄpfel, €<|im_end|>\n"
    assert train[0]["tokens"].tolist() == ids[:-4]
    assert "no answer" not in capsys.readouterr().out


def test_a_conversation_without_an_answer_left_is_named(datasets, capsys):
    train, _, _ = datasets(f"{HUGGING_FACE} --seq-length 8", CHAT)
    assert not train[0]["loss_mask"].any()
    assert "chats.jsonl:1: no answer within --seq-length" in capsys.readouterr().out


def test_a_template_that_formats_answers_differently_is_refused(datasets):
    """The message is the same after torch has carried it from a data loader's process."""
    train, _, _ = datasets(with_template(THINKING), CHAT[3:], CHAT)
    assert train[0]["loss_mask"].any()
    message = r"^chats.jsonl:2: the chat template formats message 3 .* by {% generation %}$"
    with pytest.raises(UserError, match=message):
        try:
            train[1]
        except UserError:
            carried = ExceptionWrapper(where="in DataLoader worker process 0")
            raise
    with pytest.raises(UserError, match=message):
        carried.reraise()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tokenizer-type NullTokenizer --vocab-size 10", "--sft: needs --tokenizer-type Hugging"),
        (SFT, "--sft-tokenizer-prompt-format nemotron-h-aligned: its tokens are not in the token"),
        (f"{HUGGING_FACE} --mock-data", "--mock-data is not for conversations: omit --sft"),
        (f"{HUGGING_FACE} --reset-position-ids", "--reset-position-ids is not for conversations"),
        (f"{HUGGING_FACE} --split 9,1,0", "--data-path .*: the validation part has 0 of 1"),
    ],
)
def test_what_cannot_be_run_is_refused(datasets, line, message):
    with pytest.raises(UserError, match=f"^{message}"):
        datasets(line, CHAT, samples=(1, 1, 0))


def test_a_tokenizer_without_a_chat_template_is_refused(datasets, tokenizer):
    tokenizer.chat_template = None
    tokenizer.save_pretrained("other")
    with pytest.raises(UserError, match=r"^--tokenizer-model other: has no chat template"):
        datasets(f"{HUGGING_FACE} --tokenizer-model other", CHAT)


def test_files_without_weights_are_read_once(datasets):
    """Megatron-LM's own dataset has no length there."""
    train, _, _ = datasets(f"{HUGGING_FACE} --data-path chats.jsonl chats.jsonl", CHAT, CHAT)
    assert len(train) == 4
