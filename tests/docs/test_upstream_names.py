"""CONTRIBUTING.md lists names of Megatron-LM and Transformer Engine that may change at any time."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import megatron_lowbit.megatron  # noqa: F401  before megatron

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_lowbit"
UPSTREAM = r"(?:megatron|transformer_engine)\b"
OF_PYTHON_AND_TORCH = {
    "_getframe", "_shutdown_workers", "_abort_process_group", "_replace", "_action_groups",
    "_option_string_actions", "_exit", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks", "_execution_engine", "_orig_mod",
}  # fmt: skip
ROWS = re.findall(
    rf"^\| `({UPSTREAM}[\w.]*)` \| (.+?) \| (.+?) \|",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.MULTILINE,
)
LISTED = [
    (module, name, file)
    for module, names, files in ROWS
    for name in re.findall(r"`([\w.]+)`", names)
    for file in re.findall(r"`([\w/]+\.py)`", files)
]


def upstream_names(tree: ast.AST) -> dict[str, list[str]]:
    """Return the dotted paths of upstream modules and classes by the names they have in a file."""
    found = {
        alias.asname or alias.name: [f"{node.module}.{alias.name}"]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and re.match(UPSTREAM, node.module or "")
        for alias in node.names
    }
    for node in ast.walk(tree):  # for norm in (torch_norm.WrappedTorchNorm, FusedLayerNorm):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            each = [path for part in node.iter.elts for path in paths_of(part, found)]
            if each and isinstance(node.target, ast.Name):
                found[node.target.id] = each
    return found


def paths_of(node: ast.AST, names: dict[str, list[str]]) -> list[str]:
    """Return the dotted paths of an expression that begins with an upstream name."""
    first, _, rest = ast.unparse(node).partition(".")
    is_name = first in names and re.fullmatch(r"[\w.]*", rest)
    return [f"{path}.{rest}".rstrip(".") for path in names[first]] if is_name else []


def used(file: Path) -> Iterator[str]:
    """Yield the dotted paths of upstream names that a file assigns, or that are private.

    A private name on an object, of which the file does not tell the class, has no path.
    """
    tree = ast.parse(file.read_text())
    names = upstream_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            paths = paths_of(node, names)
            is_private = re.match("_[a-zA-Z]", node.attr)
            if paths and (is_private or isinstance(node.ctx, ast.Store)):
                yield from paths
            elif is_private and ast.unparse(node.value) not in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced":
            owner, name, _ = node.args
            yield from (f"{path}.{ast.literal_eval(name)}" for path in paths_of(owner, names))


def test_the_list_is_complete():
    sources = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    known = {f"{module}.{name}" for module, name, _ in LISTED} | OF_PYTHON_AND_TORCH
    known |= {name.rpartition(".")[2] for _, name, _ in LISTED}
    known |= set(re.findall(r"(?:def |class |self\.)(_\w+)", "\n".join(sources.values())))
    missing = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file, source in sources.items()
        if re.search(rf"^\s*(from|import) {UPSTREAM}", source, re.MULTILINE)
        for name in used(file)
        if name not in known
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(("module", "name", "file"), LISTED)
def test_the_list_is_true(module, name, file):
    *owner, last = name.split(".")
    assert last in (PACKAGE / file).read_text()
    if module.startswith("megatron."):
        source = Path(find_spec(module).origin).read_text()
        assert all(part in source for part in (*owner, last.replace("__new__", "class ")))
