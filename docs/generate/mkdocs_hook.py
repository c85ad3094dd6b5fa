"""MkDocs' hook for the site: pages from the repository's root, and links that lead out of docs.

The project states no public address, so a link to a file of the repository becomes its text. A link
to a missing file stays, and fails the build.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"\[([^\[\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that GitHub gives them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages of the repository's root."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the page with its links as they lead inside the site."""
    uri = page.file.src_uri
    source = PAGES.get(uri, f"docs/{uri}")
    moved = {file: name for name, file in PAGES.items()}

    def link(found: re.Match[str]) -> str:
        text, path, anchor = found[1], found[2], found[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in moved or target.startswith("docs/"):
            inside = moved.get(target, target.removeprefix("docs/"))
            return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{anchor})"
        return text if (ROOT / target).exists() else found[0]

    return LINK.sub(link, markdown)
