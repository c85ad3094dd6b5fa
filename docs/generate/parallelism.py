"""Write what parity.py measured on a CPU into docs/distributed.md.

python docs/generate/parallelism.py
"""

from collections.abc import Sequence

from render import RESULTS, ROOT, parser, replace_sections

# isort: split
from benchmarks import parity, records


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    document = parser(__doc__, document=ROOT / "docs" / "distributed.md").parse_args(argv).document
    cells = records.read(RESULTS / "parity.json", "cells")
    replace_sections(document, {"parity": parity.table(cells, parity.LAYOUTS)})


if __name__ == "__main__":
    main()
