"""Write what parity.py measured on a CPU into docs/parallelism.md.

python docs/generate/parallelism.py
"""

import json
import sys

from markdown import RESULTS, ROOT, replace_sections

sys.path.insert(0, str(ROOT / "benchmarks"))

from parity import LAYOUTS, table

if __name__ == "__main__":
    cells = json.loads((RESULTS / "parity.json").read_text())["cells"]
    replace_sections(ROOT / "docs" / "parallelism.md", {"parity": table(cells, LAYOUTS)})
