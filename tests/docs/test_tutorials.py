"""The tutorials run: their blocks of code in order, with the output that they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, Code, code_of

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FILE = re.compile(r"# (\S+\.(?:yaml|args))\n")
NUMBER = re.compile(r"(\.\.\.|\d[\d,]*(?:\.\d+)?)")


def program_of(blocks: list[Code]) -> str:
    """Return one program in Python that writes the files of a page and runs the rest in order."""
    lines = ["import pathlib, subprocess"]
    for language, text in blocks:
        if name := FILE.match(text):
            lines.append(f"pathlib.Path({name[1]!r}).write_text({text!r})")
        elif language == "python":
            lines.append(f"exec({text!r})")
        elif language == "":
            lines.append(f"subprocess.run(['bash', '-ec', {text!r}], check=True)")
    return "\n".join(lines)


def is_shown(expected: str, line: str) -> bool:
    """Compare a line of output with one of a page, where ``...`` stands for any text.

    Numbers may differ by 2%: processors add in different orders.
    """
    parts = NUMBER.split(" ".join(expected.split()))
    pattern = "".join(
        re.escape(part) if at % 2 == 0 else ".*" if part == "..." else NUMBER.pattern
        for at, part in enumerate(parts)
    )
    found = re.fullmatch(pattern, " ".join(line.split()))
    numbers = [part for part in parts[1::2] if part != "..."]
    return found is not None and all(
        float(shown.replace(",", "")) == pytest.approx(float(number.replace(",", "")), rel=0.02)
        for shown, number in zip(found.groups(), numbers, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial(page: Path, tmp_path: Path):
    blocks = [code for code in code_of(page) if "\n" in code.text]  # no spans
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program_of(blocks)], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = iter(done.stdout.splitlines())
    for block in blocks:
        for expected in block.text.splitlines() if block.language == "text" else ():
            assert any(is_shown(expected, line) for line in lines), f"{expected}\n{done.stdout}"


@pytest.mark.parametrize("line", ["loss 2.10", "loss 2.0 more", "los 2.0"])
def test_other_output_is_found(line: str):
    assert is_shown("loss 2.00", "loss  2.01") and not is_shown("loss 2.00", line)
