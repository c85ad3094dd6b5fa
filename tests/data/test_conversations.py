"""Files of conversations: what is read of them, and what is refused."""

import json

import pytest

from megatron_lowbit.data.conversations import Conversations
from megatron_lowbit.errors import UserError

SYSTEM, ASKS, ANSWERS = (
    {"role": role, "content": f"{role}'s ü"} for role in ("system", "user", "assistant")
)


@pytest.fixture
def file(tmp_path):
    """Function that writes lines, given as JSON values or as bytes, and returns the path."""

    def write(*lines: object) -> str:
        content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path = tmp_path / "chats.jsonl"
        path.write_bytes(b"\n".join(content))
        return str(path)

    return write


def test_lines_of_several_conversations_and_empty_ones(file):
    first = [ASKS, ANSWERS | {"name": "kept"}]
    second, third = [SYSTEM, ASKS, ANSWERS], [SYSTEM, ASKS, ANSWERS, ASKS, ANSWERS]
    path = file({"messages": first, "id": 3}, b" ", {"messages": second + third})
    conversations = Conversations(path)
    assert [conversations[number] for number in range(3)] == [first, second, third]
    assert len(conversations) == 3
    locations = [conversations.location(number) for number in range(3)]
    assert locations == [f"{path}:1", f"{path}:3", f"{path}:3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        ([ASKS, ANSWERS], "holds no JSON object"),
        ({"text": "plain"}, '"messages" must be a list of messages'),
        ({"messages": []}, '"messages" must be a list of messages'),
        ({"messages": ["hello"]}, "a JSON object is expected, not str"),
        ({"messages": [{"content": "hello"}]}, "key 'role' is missing; there are content"),
        ({"messages": [ASKS, ANSWERS | {"content": None}]}, "'content' must hold a string"),
        ({"messages": [ASKS, ANSWERS | {"content": "\ud800"}]}, "'content' holds a lone surrogate"),
        ({"messages": [ASKS]}, "a conversation without a message of the assistant"),
        ({"messages": [SYSTEM, ASKS, ANSWERS, SYSTEM, ASKS]}, "a conversation without a message"),
        ({"messages": [ANSWERS, ASKS]}, "a conversation begins with the assistant"),
    ],
)
def test_a_line_that_holds_no_conversation(file, line, message):
    path = file({"messages": [ASKS, ANSWERS]}, line)
    with pytest.raises(UserError, match=f"^{path}:2: .*{message}"):
        Conversations(path)


def test_files_that_hold_none(file, tmp_path):
    with pytest.raises(UserError, match=r"chats\.jsonl: holds no conversation"):
        Conversations(file(b""))
    with pytest.raises(UserError, match="none: No such file or directory; --sft reads "):
        Conversations(str(tmp_path / "none"))


def test_a_line_that_is_too_long_for_memory(file, monkeypatch):
    monkeypatch.setattr("megatron_lowbit.data.corpus._MOST_BYTES", 1000)
    path = file({"messages": [ASKS, ANSWERS]}, b"\0" * 1000)
    with pytest.raises(UserError, match=f"^{path}:2: longer than"):
        Conversations(path)
