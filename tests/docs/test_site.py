"""Navigation of the site, its API reference, and its strict build where MkDocs is installed."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pages import ROOT

import megatron_lowbit

DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
FROM_THE_ROOT = {"contributing.md", "changelog.md"}


def navigated(entry: object) -> Iterator[str]:
    """Yield the pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from navigated(part)


def test_navigation():
    """It has each page once, except docs/research, to which the index links."""
    found = list(navigated(SITE["nav"]))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    research = {page for page in pages if page.startswith("research/")}
    assert sorted(found) == sorted((pages - research) | FROM_THE_ROOT)
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert all(f"({page})" in index for page in research)


def test_reference():
    """It has the public names of the package, and no others."""
    names = re.findall(r"^::: megatron_lowbit\.[\w.]*?(\w+)$", (DOCS / "api.md").read_text(), re.M)
    assert sorted([*names, "__version__"]) == sorted(megatron_lowbit.__all__)


@pytest.mark.parametrize(
    "link", ["", "nowhere.md", "quickstart.md#nowhere", "../nowhere.py", "../CONTRIBUTING.md#no"]
)
def test_strict_build(link: str, tmp_path: Path):
    """It fails on a dead link, and passes without one."""
    pytest.importorskip("mkdocs", reason="without the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    docs, site = tmp_path / "docs", tmp_path / "site"
    shutil.copytree(DOCS, docs)
    with (docs / "pytorch.md").open("a", encoding="utf-8") as page:
        page.write(f"\n[a link]({link})\n" if link else "")
    file = str(ROOT / "mkdocs.yml")
    config = load_config(file, docs_dir=str(docs), site_dir=str(site), strict=True)
    if link:
        with pytest.raises(Abort):
            build(config)
    else:
        build(config)
        text = (site / "contributing.html").read_text(encoding="utf-8")
        assert 'href="research/upstream-notes.html"' in text
