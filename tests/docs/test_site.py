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


@pytest.fixture
def build_site(tmp_path: Path):
    """Builds the site, with lines added to one of its pages, and returns its folder."""
    pytest.importorskip("mkdocs", reason="without the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    def made(added: str = "") -> Path:
        docs, site = tmp_path / "docs", tmp_path / "site"
        shutil.copytree(DOCS, docs)
        with (docs / "pytorch.md").open("a", encoding="utf-8") as page:
            page.write(added)
        file = str(ROOT / "mkdocs.yml")
        build(load_config(file, docs_dir=str(docs), site_dir=str(site), strict=True))
        return site

    return made


@pytest.mark.slow  # `make docs` does the same
def test_strict_build(build_site):
    text = (build_site() / "contributing.html").read_text(encoding="utf-8")
    assert 'href="research/upstream-notes.html"' in text


@pytest.mark.slow
def test_dead_links(build_site, caplog):
    """Each of them is named, as the site has it."""
    exceptions = pytest.importorskip("mkdocs.exceptions", reason="without the extra docs")
    links = ["nowhere.md", "quickstart.md#nowhere", "../nowhere.py", "../CONTRIBUTING.md#no"]
    with pytest.raises(exceptions.Abort):
        build_site("".join(f"\n[a link]({link})\n" for link in links))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    named = ["'nowhere.md'", "'quickstart.md#nowhere'", "'../nowhere.py'", "'contributing.md#no'"]
    for link in named:
        assert any("'pytorch.md'" in text and link in text for text in warned), link
