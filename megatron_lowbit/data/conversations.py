"""Files of conversations: one JSON object per line, as Megatron-LM's ``--sft`` reads them."""

from typing import Any

import numpy as np

from megatron_lowbit.data.corpus import numbered_lines, text_of
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.folders import reason
from megatron_lowbit.json_files import as_object, parse_json

Conversation = list[dict[str, Any]]
"""Messages with the strings ``role`` and ``content``, and with any other keys."""


class Conversations:
    """Sequence of the conversations in a file, of which only an index is in memory.

    A line is ``{"messages": [{"role": "user", "content": "..."}, ...]}``. In a line of several
    conversations, each begins with a message of the role ``system``. Empty lines are ignored.

    Raises UserError where the file cannot be read or has no conversation, or a line holds something
    else, or a conversation that begins with an answer or has none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        index, start = [], 0
        try:
            with open(path, "rb") as lines:
                for number, (source, line) in enumerate(numbered_lines(path, lines), 1):
                    end = start + len(line)
                    if line.strip():
                        count = len(_parse(line, source))
                        index += [(start, end, number, part) for part in range(count)]
                    start = end
        except (OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: {reason(error)}; --sft reads .jsonl files") from None
        require(bool(index), f"{path}: holds no conversation")
        # First byte, last byte + 1, line number, and index among the line's conversations.
        self._index = np.array(index, np.int64)
        self._bytes = np.memmap(path, np.uint8, "r")

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> Conversation:
        """Read a conversation from the file."""
        start, end, _, part = self._index[number]
        return _parse(self._bytes[start:end].tobytes(), self.location(number))[part]

    def location(self, number: int) -> str:
        """Return the file and the line of a conversation, for messages."""
        return f"{self._path}:{self._index[number, 2]}"

    def check_part(self, name: str, bounds: tuple[float, float], argument: str) -> None:
        """Raise UserError for a part, between two shares of the file, without a conversation.

        ``name`` is the part's, ``argument`` the one that names the file.
        """
        first, last = (round(bound * len(self)) for bound in bounds)  # as Megatron-LM rounds
        require(
            first < last,
            f"{argument} {self._path}: the {name} part has 0 of {len(self)} conversations; raise "
            "its share in --split, add data, or train without validation: --split 100,0,0 "
            "--eval-iters 0",
        )


def _parse(line: bytes, source: str) -> list[Conversation]:
    """Return the conversations of a line."""
    messages = as_object(parse_json(line, source), source).get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{source}: "messages" must be a list of messages')
    conversations: list[Conversation] = []
    for message in messages:
        role = text_of(message, "role", source)
        text_of(message, "content", source)
        if role == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    for conversation in conversations:
        roles = [message["role"] for message in conversation]
        require(
            "assistant" in roles, f"{source}: a conversation without a message of the assistant"
        )
        require(roles[0] != "assistant", f"{source}: a conversation begins with the assistant")
    return conversations
