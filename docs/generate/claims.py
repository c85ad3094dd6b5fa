"""Write docs/research/claims.md from docs/templates/claims.yaml.

python docs/generate/claims.py
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from render import ROOT, parser, render

PAGE = ROOT / "docs" / "research" / "claims.md"
CLAIMS = ROOT / "docs" / "templates" / "claims.yaml"
STATES = ["shown", "contradicted", "needs hardware", "shown in part", "not shown", "not tried"]


class Claim(NamedTuple):
    """A row of the file; ``files`` are those that show it, tests as FILE::TEST."""

    place: str
    text: str
    state: str
    note: str
    files: tuple[str, ...]


def read() -> tuple[Mapping[str, str], Mapping[str, list[Claim]]]:
    """Return the titles of sources and their claims, by the short names of sources."""
    sources = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    claims = {
        name: [Claim(*row[:4], tuple(row[4:])) for row in source["claims"]]
        for name, source in sources.items()
    }
    return {name: source["title"] for name, source in sources.items()}, claims


def evidence(claim: Claim) -> str:
    """Return the note with links to the files."""
    return "; ".join(filter(None, [claim.note, ", ".join(map(_link, claim.files))]))


def _link(file: str) -> str:
    path, _, test = file.partition("::")
    name = f"`{test}`" if test else Path(path.partition("#")[0]).name
    return f"[{name}]({os.path.relpath(ROOT / path, PAGE.parent)})"


def _counts(claims: Mapping[str, Sequence[Claim]]) -> Iterator[list[object]]:
    """Yield a row for each source, and one of sums: claims, then claims in each state."""
    total: Counter[str] = Counter()
    for name, rows in claims.items():
        found = Counter(claim.state for claim in rows)
        total += found
        yield [name, len(rows), *(found[state] for state in STATES)]
    yield ["all", total.total(), *(total[state] for state in STATES)]


def page() -> str:
    """Return the page's text."""
    titles, claims = read()
    tables = [
        (titles[name], [(x.place, x.text, x.state, evidence(x)) for x in rows])
        for name, rows in claims.items()
    ]
    return render("claims", states=STATES, counts=list(_counts(claims)), sources=tables)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    args = parser(__doc__, page=PAGE).parse_args(argv)
    args.page.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
