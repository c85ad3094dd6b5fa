"""Statements that something was not run or measured are true of the results in the repository."""

import json
import re
from collections.abc import Iterator

import pytest
from pages import PAGES, ROOT, prose_of

NOT_RUN = re.compile(r"\bnot\s+(?:(?:yet|been)\s+)*(?:run|measured|timed)\b", re.IGNORECASE)
WORDS = {
    "TP2": "tensor parallelism", "PP2": "pipeline parallelism", "CP2": "context parallelism",
    "EP2": "expert parallelism", "FSDP": "FSDP", "graphs": "CUDA graphs", "MoE": "experts",
    "MLA": "MLA|latent attention", "MTP": "MTP|multi-token prediction", "hybrid": "hybrids?",
    "async-save": "asynchronous saves?", "B200": "B200s?|Blackwell",
}  # fmt: skip
"""Features of compose.py, names in cases of other benchmarks and a GPU, by the words of pages."""
OTHERS = {
    "CHANGELOG.md", "composition.md", "conversion.md", "finetune-and-serve.md",
    "megatron-bridge.md", "pytorch.md", "reinforcement-learning.md", "rollouts.md", "torchtitan.md",
}  # fmt: skip
"""Pages on other programs than Megatron-LM, of which the results are; a page made from results."""
CHECKED = [page for page in PAGES if page.name not in OTHERS]


def measured() -> str:
    """Return the words of all that a GPU has run, as a pattern."""
    found = set()
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        data = json.loads(file.read_text())
        gpu = (data["machine"].get("gpu") if "machine" in data else None) or "none"
        if gpu != "none":
            cells = (cell["features"] for cell in data.get("cells", ()) if "loss" in cell)
            cases = (re.split(r"\W", row["case"]) for row in data.get("rows", ())
                     if "median_ms" in row and "case" in row)  # fmt: skip
            found |= {gpu.split()[1], *(name for names in [*cells, *cases] for name in names)}
    return "|".join(WORDS[name] for name in sorted(found & WORDS.keys()))


MEASURED = re.compile(rf"\b(?:{measured()})\b")


def statements(text: str) -> Iterator[str]:
    """Yield a page's sentences and rows that say "not run", and all under a heading that does."""
    for section in re.split(r"(?m)^(?=#+ )", text):
        heading = section.partition("\n")[0]
        for statement in re.split(r"(?<=[.!?])\s+|\n(?=\n|[|#-])", section):
            if NOT_RUN.search(statement) or (heading.startswith("#") and NOT_RUN.search(heading)):
                yield statement


def false_ones(text: str) -> list[str]:
    """Return the statements of a page that name something that a GPU has run."""
    return [statement for statement in statements(text) if MEASURED.search(statement)]


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_statements_of_pages(page):
    assert not false_ones(prose_of(page))


@pytest.mark.parametrize(
    ("text", "false"),
    [
        ("**Not run** on GPUs with this\nversion: experts, MLA, several hosts.", 1),
        ("**Not measured**: B200, more than one host, expert parallelism. A layer.", 1),
        ("## Not run\n\n| | state |\n| --- | --- |\n| CUDA graphs | never |\n| B200 | never |", 1),
        ("Experts ran. Several hosts were not run.\n\nExperts, MLA.", 0),
        ("| experts | 1.2 |\n| several hosts | not run |", 0),
    ],
)
def test_false_statements_are_found(text, false):
    assert len(false_ones(text)) == false
