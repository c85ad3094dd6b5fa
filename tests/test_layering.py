"""Imports within the package only go down: a folder imports from those above it in this list."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_lowbit"
# Subfolders that are not in the list belong to their parents.
ORDER = (
    "errors", "lazy", "replaced", "version", "command_line", "console", "folders", "json_files",
    "numerics", "kernels", "recipes", "layers", "pytorch", "collectives", "transformer_engine",
    "factories", "storage", "cpu_runtime", "arguments", "data", "analysis", "planning",
    "megatron", "study", "checkpoints", "conversion", "commands", "integrations",
)  # fmt: skip


def place(module: str) -> int:
    """Return the number in the list of a module, named from below the package."""
    path = module.replace(".", "/")
    holders = [name for name in ORDER if path == name or path.startswith(name + "/")]
    return ORDER.index(max(holders, key=len))


def imports(file: Path) -> set[str]:
    """Return the modules below the package that a file imports, in functions as well."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name:
            found |= {f"{PACKAGE.name}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    prefix = f"{PACKAGE.name}."
    return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_down(name):
    upward = []
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if module == "__init__" or ORDER[place(module)] != name:
            continue
        own = place(module)
        upward += [f"{module}: {other}" for other in sorted(imports(file)) if place(other) > own]
    assert not upward, "\n".join(upward)
