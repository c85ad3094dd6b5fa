"""Megatron-LM's ``--sft``: a conversation in each sequence, and its answers in the loss."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset

from megatron_lowbit.data.conversations import Conversation, Conversations
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.megatron.run.errors import say_on_rank_0

_MARK = re.compile(r"\{%[-+]?\s*generation\b")
"""Mark of an answer in a chat template; a sign says what Jinja does with the blanks before it."""


class ConversationError(UserError):
    """Conversation of the data that cannot be tokenized.

    Data loaders' processes hand on an exception as one of its type, whose message is a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class ConversationTokenizer:
    """Interface of a tokenizer that Megatron-LM's ``SFTDataset`` reads.

    ``tokenizer`` is Megatron-LM's, of the type HuggingFaceTokenizer or SFTTokenizer. ``pad`` is no
    token, so that ``SFTDataset`` masks what it fills up, but no end of an answer: many tokenizers
    have one token for both.
    """

    pad = IGNORE_INDEX

    eod = property(lambda self: self.tokenizer.eod)
    vocab_size = property(lambda self: self.tokenizer.vocab_size)
    unique_identifiers = property(lambda self: self.tokenizer.unique_identifiers)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def tokenize_conversation(
        self, conversation: Conversation, return_target: bool, add_generation_prompt: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (tokens,), and the same with IGNORE_INDEX outside of answers."""
        if self.tokenizer.library == "sft":
            return self.tokenizer.tokenize_conversation(
                conversation, return_target, add_generation_prompt
            )
        return _tokenize(self.tokenizer, conversation)


def conversation_tokenizer(tokenizer: Any, prompt_format: str) -> ConversationTokenizer:
    """Return the interface to a tokenizer; raise UserError if it cannot tokenize conversations.

    ``prompt_format``: value of ``--sft-tokenizer-prompt-format``.
    """
    library = getattr(tokenizer, "library", None)
    if library == "sft":
        require(
            tokenizer.pad is not None,
            f"--sft-tokenizer-prompt-format {prompt_format}: its tokens are not in the tokenizer; "
            "--tokenizer-type HuggingFaceTokenizer formats by the model's own chat template",
        )
        masked = "all tokens" if prompt_format in ("default", "identity") else "only answers"
        say_on_rank_0(f"--sft: the format {prompt_format}, {masked} in the loss")
    else:
        require(library == "huggingface", "--sft: needs --tokenizer-type HuggingFaceTokenizer, or "
                "SFTTokenizer")  # fmt: skip
        require(
            isinstance(tokenizer.chat_template, str),
            f"--tokenizer-model {tokenizer.path}: has no chat template, or several; give one by "
            "--chat-template",
        )
        say_on_rank_0("--sft: the tokenizer's chat template, only answers in the loss")
    return ConversationTokenizer(tokenizer)


def _tokenize(tokenizer: Any, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize by a chat template, and find the answers.

    They are what the template marks, if it marks anything. Otherwise an answer is what follows the
    prompt for it, up to the end of its message.
    """
    is_marked = _MARK.search(tokenizer.chat_template) is not None
    encoded = tokenizer.apply_chat_template(
        conversation,
        return_dict=True,
        return_assistant_tokens_mask=is_marked,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    tokens = np.array(encoded["input_ids"], np.int64)
    if is_marked:
        is_answer = np.array(encoded["assistant_masks"], bool)
    else:
        first, last = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        is_answer = np.zeros(len(tokens), bool)
        for start, end in _answers(tokenizer, conversation):
            is_answer |= (first < end) & (last > start)
    return tokens, np.where(is_answer, tokens, IGNORE_INDEX)


def _answers(tokenizer: Any, conversation: Conversation) -> list[tuple[int, int]]:
    """Return the first and last character + 1 of each answer in the formatted conversation."""

    def text_of(messages: Conversation, prompts: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompts
        )

    text, answers = text_of(conversation), []
    for number, message in enumerate(conversation):
        if message["role"] == "assistant":
            prompt = text_of(conversation[:number], prompts=True)
            answered = text_of(conversation[: number + 1])
            if not (text.startswith(answered) and answered.startswith(prompt)):
                raise ValueError(
                    f"the chat template formats message {number + 1} differently within the "
                    "conversation; give a --chat-template that marks answers by {% generation %}"
                )
            answers.append((len(prompt), len(answered)))
    return answers


@dataclass
class ConversationsConfig(GPTDatasetConfig):
    """Configuration of datasets of conversations.

    Attributes:
        files: content of each file by its path.
    """

    files: dict[str, Conversations] = field(default_factory=dict)


class ConversationDataset(SFTDataset):
    """Megatron-LM's dataset for ``--sft``, with files that are read here.

    Its sequences hold one conversation each, since its low-level dataset has no lines of several:
    local attention cannot separate several. Padding comes last, where causal layers never read it.
    """

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: ConversationsConfig) -> Conversations:
        """Return the conversations of a file."""
        return config.files[dataset_path]

    def __len__(self) -> int:
        """Return the number of samples; if it is None, the number of conversations."""
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample with ids of the vocabulary in all places, or raise ConversationError."""
        where = self.dataset.location(self.indices[index % len(self.indices)])
        try:
            sample = super().__getitem__(index)
        except Exception as error:  # a template may raise any
            raise ConversationError(f"{where}: {error}") from error
        if not sample["loss_mask"].any():
            say(f"{where}: no answer within --seq-length, not in the loss")
        for name in ("tokens", "labels"):
            sample[name][sample[name] == IGNORE_INDEX] = 0  # Nothing reads it.
        return sample
