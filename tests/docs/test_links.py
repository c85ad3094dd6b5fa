"""Relative links of the README and of docs lead to files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links(page: Path):
    targets = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    paths = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    missing = [path for path in paths if not (page.parent / path).exists()]
    assert not missing, f"{page.name} links to {', '.join(missing)}"
    outside = [p for p in paths if not (page.parent / p).resolve().is_relative_to(ROOT.resolve())]
    assert not outside, f"{page.name} links out of the repository: {', '.join(outside)}"
