"""Commands of docs/debug.md and the errors that the page shows."""

import re
import shlex
import sys

import pytest
from tiny_run import ROOT

from megatron_lowbit.commands import pretrain

PAGE = (ROOT / "docs" / "debug.md").read_text(encoding="utf-8")
RUN = re.search(r"^    python (pretrain_gpt.py .*)$", PAGE, re.MULTILINE)[1]
SHOWN = re.findall(r"^\$ RUN (.*)\n(error: .*)$", PAGE, re.MULTILINE)


def test_every_command_is_found():
    assert len(SHOWN) == PAGE.count("\n$ ") == PAGE.count("\nerror: ") == 13


@pytest.mark.parametrize(("more", "line"), SHOWN, ids=[more for more, _ in SHOWN])
def test_commands_give_what_is_shown(more, line, corpus, tmp_path, monkeypatch, capsys):
    """A small dataset replaces the page's."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer").symlink_to(corpus / "tokenizer")
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / "data" / f"stdlib{suffix}").symlink_to(corpus / f"data{suffix}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*shlex.split(RUN), *shlex.split(more)])
    with pytest.raises(SystemExit) as ended:
        pretrain(hybrid=False)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
