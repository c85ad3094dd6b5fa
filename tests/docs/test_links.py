"""Relative links of the pages lead to files and headings that exist."""

import re
from functools import cache
from pathlib import Path

import pytest
from pages import NAMES, PAGES, ROOT, code_of, prose_of

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
NAMED = re.compile(r'<a id="([^"]+)">')
SOURCE = re.compile(r"(\w+)/[\w/-]+\.(?:py|json)")
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings: letters, digits and hyphens."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set(NAMED.findall(text))
    for heading in HEADING.findall(text):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        again = sum(1 for other in found if re.fullmatch(rf"{re.escape(name)}(-\d+)?", other))
        found.add(f"{name}-{again}" if again else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links(page: Path):
    targets = LINK.findall(prose_of(page))
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT.resolve()), f"{page.name} links out of the repository"
        assert not anchor or anchor in anchors(file), f"{target}: there are {anchors(file)}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_source_files(page: Path):
    """A file of the project that a page names in its text exists; the changelog names old ones."""
    if page.name == "CHANGELOG.md":
        return
    roots = [page.parent, ROOT, ROOT / "megatron_lowbit"]
    for code in code_of(page):
        named = SOURCE.fullmatch(code.text)
        if named and any((root / named[1]).is_dir() for root in roots[1:]):
            assert any((root / code.text).is_file() for root in roots), code.text
