"""Agreement of ranks on errors."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowbit.errors import UserError, error_behind
from megatron_lowbit.megatron.run.errors import raise_on_all_ranks

FOLDER = Path("/somewhere")


@pytest.fixture
def other_rank(monkeypatch):
    """Function that makes this process one of two ranks, given the other's report."""

    def play(report: tuple[bool, str] | None) -> list:
        told = []

        def gather(reports: list, own: object) -> None:
            told.append(own)
            reports[:] = [own, report]

        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_gather_object", gather)
        return told

    return play


def test_success_on_all_ranks(other_rank):
    told = other_rank(None)
    with raise_on_all_ranks("read", FOLDER):
        pass
    assert told == [None]


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (UserError("x: damaged"), (True, "x: damaged")),
        (OSError(28, "No space left on device"), (True, "cannot read /somewhere: No space left")),
        (OSError(30, "Read-only file system", "/a/b"), (True, "/a/b: Read-only file system")),
        (OSError("odd"), (True, "cannot read /somewhere: odd")),
        (CheckpointException("many", {1: (UserError("x: damaged"), None)}), (True, "x: damaged")),
    ],
)
def test_bad_input_here_is_the_same_line_everywhere(other_rank, error, report):
    told = other_rank(None)
    with pytest.raises(UserError) as caught, raise_on_all_ranks("read", FOLDER):
        raise error
    ((is_user_error, message),) = told
    assert is_user_error is report[0] and message.startswith(report[1])
    assert str(caught.value) == message and "\n" not in message


def test_bad_input_elsewhere(other_rank):
    other_rank((True, "y: damaged"))
    with pytest.raises(UserError, match=r"^y: damaged$"), raise_on_all_ranks("read", FOLDER):
        pass


def test_bad_input_elsewhere_explains_an_error_here(other_rank):
    other_rank((True, "y: damaged"))
    with (
        pytest.raises(UserError, match=r"^y: damaged$") as caught,
        raise_on_all_ranks("read", FOLDER),
    ):
        raise KeyError("follows from it")
    assert isinstance(caught.value.__cause__, KeyError)


def test_another_error_here_is_raised_as_it_is(other_rank):
    told = other_rank(None)
    with pytest.raises(KeyError), raise_on_all_ranks("read", FOLDER):
        raise KeyError("a bug")
    assert told == [(False, "KeyError('a bug')")]


def test_another_error_elsewhere(other_rank):
    other_rank((False, "KeyError('a bug')"))
    failure = r"another rank failed: KeyError\('a bug'\)"
    with pytest.raises(RuntimeError, match=failure), raise_on_all_ranks("read", FOLDER):
        pass


def test_the_cause_of_an_error_is_found():
    mistake = UserError("x")
    middle = RuntimeError("y")
    middle.__cause__ = mistake
    outer = CheckpointException("z", {0: (middle, None)})
    assert error_behind(mistake, UserError) is mistake
    assert error_behind(outer, UserError) is mistake
    assert error_behind(outer, OSError) is None


@pytest.mark.usefixtures("single_process")
def test_a_real_group_of_one():
    with raise_on_all_ranks("read", FOLDER):
        pass
    with pytest.raises(UserError, match=r"^x$"), raise_on_all_ranks("read", FOLDER):
        raise UserError("x")
