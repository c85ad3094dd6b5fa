"""Openings of docstrings: functions begin with an imperative verb, nothing with What or Of."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("megatron_lowbit", "benchmarks", "docs", "tools", "examples", "tests")
FRAGMENTS = {"what", "whether", "where", "who", "whose", "which", "how", "why", "of"}
VERBS = """
accept accumulate activate add adopt advance align allocate allow append apply approximate ask
assemble assert assign attach attend average begin bind block bound break broadcast build call
cast change check choose clear close collect combine compare compile complete compose compress
compute concatenate connect construct continue convert convolve copy count create cut decode
decompress define delete dequantize derive describe detach detect differentiate disable discard
dispatch distribute divide download draw drop dump emit enable encode end ensure enter escape
estimate evaluate exchange exclude execute exempt exit expand expect export extend extract fail
fetch fill filter find finish flatten flush fold forbid forget format forward free fuse gather
generate get give group guard hand handle hash hide hold identify ignore imitate implement import
initialize insert install integrate interleave interpret intersect invert invoke iterate join keep
kill launch leave let limit link list load locate lock log look lower make map mark match measure
merge modify move multiply name normalize open order override overwrite pack pad parse partition
pass permute pickle place plan plant plot pop prepare pretend print process produce propagate
prove provide push put quantize quote raise read rebuild receive recompute record recover reduce
refuse register reject release reload remember remove rename render repeat replace replay report
represent request require reset reshape resolve restore resume return reuse rewrite rotate round
run sample save scale schedule search see select send serialize set shard share show simulate skip
smooth sort split start state stop store stream subtract sum swap switch synchronize tabulate take
tell test time tokenize trace track train transform translate transpose truncate turn unflatten
unpack unwrap update use validate verify view visit visualize wait walk warn watch wrap write
yield zero
"""


def openings(path: Path) -> list[str]:
    """Return the first lines of docstrings that begin with something else, each with its place."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        word = docstring.split()[0].strip(".,:;").lower()
        if word in FRAGMENTS or (needs_a_verb(node) and word not in VERBS.split()):
            found.append(f"{path}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}")
    return found


def needs_a_verb(node: ast.AST) -> bool:
    """Return True for functions that are called: no properties, no fixtures, no tests."""
    if not isinstance(node, ast.FunctionDef):
        return False
    marked = [ast.unparse(decorator) for decorator in node.decorator_list]
    described = any("property" in name or "fixture" in name for name in marked)
    return not described and not node.name.startswith("test_")


@pytest.mark.parametrize("folder", FOLDERS)
def test_openings(folder):
    wrong = [line for path in sorted((ROOT / folder).rglob("*.py")) for line in openings(path)]
    assert not wrong, "\n".join(wrong)
