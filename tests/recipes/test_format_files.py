"""Python files that a recipe names under ``formats``: when they run, and what is refused."""

from pathlib import Path

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import FORMATS
from megatron_lowbit.numerics.extra_formats import refuse_format_files
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.recipes.load import read_recipe
from megatron_lowbit.recipes.record import files_named_by
from tests.recipes.conftest import refused

# MXFP4 under another name.
MODULE = """
from dataclasses import replace
from megatron_lowbit.numerics import format_by_name
FORMATS = (replace(format_by_name("mxfp4"), name="NAME"),)
"""
RECIPE = """
name: mine
formats: [FILE]
configs: {low: {input: {format: FORMAT}}}
matchers: {all: {type: glob, pattern: "*", config: low, enabled: true}}
"""


def write(folder: Path, name: str = "own4", module: str = MODULE, file: str | None = None) -> str:
    """Write a recipe and its file of formats; return the recipe's path."""
    file = file or f"{name}.py"
    (folder / file).write_text(module.replace("NAME", name))
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.replace("FILE", file).replace("FORMAT", name))
    return str(recipe)


def test_a_file_beside_the_recipe(tmp_path, monkeypatch):
    """From any folder, and the same recipe each time that it is loaded."""
    path = write(tmp_path)
    monkeypatch.chdir("/")
    recipe = load_recipe(path)
    assert recipe.configs["low"].fprop.lhs.format.name == "own4"
    assert load_recipe(path) == recipe
    monkeypatch.chdir(tmp_path)
    assert load_recipe("own4.yaml") == recipe
    assert load_recipe("own4.yaml", ["input.scale_rounding=ceil"]) != recipe


def test_a_recipe_that_a_switch_names(tmp_path):
    path = write(tmp_path)
    recipe = load_recipe("nvfp4", [f"switches.late={{fraction: 0.5, to: {path}}}"])
    assert recipe.switches[0].recipe.configs["low"].fprop.lhs.format.name == "own4"
    switched = tmp_path / "switched.yaml"
    before = Path(path).read_text().replace("formats:", "# formats:").replace("own4", "mxfp4")
    switched.write_text(f"{before}switches: {{late: {{fraction: 0.5, to: {path}}}}}\n")
    assert files_named_by(str(switched)) == [path, *read_recipe(path)["formats"]]


def test_a_copy_elsewhere_is_the_same_format(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    assert load_recipe(write(tmp_path)) == load_recipe(write(other))


def test_an_option_of_the_new_format(tmp_path):
    with pytest.raises(UserError, match=r"low\.input\.scale_format: no such key .* scale_rounding"):
        load_recipe(write(tmp_path), ["input.scale_format=pow2"])


@pytest.mark.parametrize(
    "module, parts",
    [
        ("x = 1\nFORMATS = (UNKNOWN,)", ["line 2: NameError", "UNKNOWN"]),
        ("FORMATS = (", ["line 1", "never closed"]),
        ("import nowhere_at_all", ["line 1: ModuleNotFoundError"]),
        ("x = 1", ["FORMATS must be a tuple of BlockFormat"]),
        ("FORMATS = ('own4',)", ["FORMATS must be a tuple of BlockFormat"]),
        (MODULE.replace("NAME", "nvfp4"), ["there is a format nvfp4 already"]),
        (
            MODULE
            + "class Own(type(FORMATS[0])):\n    scale_kernel = 'scales:own'\n"
            + "FORMATS = (Own(**vars(FORMATS[0])),)\n",
            ["own4.scale_kernel has no effect", "kernels.support.kernel_of"],
        ),
    ],
)
def test_a_bad_file(tmp_path, module, parts):
    before = dict(FORMATS)
    message = refused(load_recipe, write(tmp_path, module=module), parts=parts)
    assert message.startswith(f"own4.yaml: formats.0: format file {tmp_path / 'own4.py'}: ")
    assert before == FORMATS


def test_other_files(tmp_path):
    path = Path(write(tmp_path))
    text = path.read_text()
    for file, problem in (
        ("gone.py", "gone.py: No such file or directory"),
        ("own4.txt", r"own4.txt: its name must end in .py"),
        ("3", "formats.0: input should be a valid string"),
    ):
        path.write_text(text.replace("own4.py", file))
        with pytest.raises(UserError, match=problem):
            load_recipe(str(path))
    path.write_text(text.replace("[own4.py]", "own4.py"))
    with pytest.raises(UserError, match="formats: input should be a valid list"):
        load_recipe(str(path))


def test_two_files_of_one_name(tmp_path):
    load_recipe(write(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    path = write(other, "own5", file="own4.py")
    with pytest.raises(UserError, match=r"another own4\.py was loaded before"):
        load_recipe(path)


# What does not run


@pytest.fixture
def trap(tmp_path) -> tuple[str, Path]:
    """A recipe whose file of formats leaves a trace."""
    trace = tmp_path / "trace"
    return write(tmp_path, module=f"open({str(trace)!r}, 'w')\n{MODULE}"), trace


def test_a_recipe_without_formats_runs_nothing(trap):
    path, trace = trap
    text = Path(path).read_text().replace("formats: [own4.py]\n", "")
    Path(path).write_text(text)
    with pytest.raises(UserError, match="unknown format 'own4'"):
        load_recipe(path)
    assert not trace.exists()


def test_an_override_adds_no_file(trap):
    _, trace = trap
    with pytest.raises(UserError, match="formats are named only in a recipe file"):
        load_recipe("nvfp4", [f"formats=[{trace.parent / 'own4.py'}]"])
    assert not trace.exists()


def test_a_recipe_that_a_checkpoint_names(trap):
    path, trace = trap
    with (
        refuse_format_files("name it by --recipe"),
        pytest.raises(UserError, match=r"own4.py: not run; name it by --recipe"),
    ):
        load_recipe(path)
    assert not trace.exists()
    load_recipe(path)
    assert trace.exists()


# Unknown formats


@pytest.mark.parametrize(
    "name, end",
    [
        ("nvpf4", "'nvpf4'; did you mean nvfp4, nvfp4-2d?"),
        ("posit", f"'posit'; there are {', '.join(FORMATS)}"),
    ],
)
def test_an_unknown_format(name, end):
    with pytest.raises(UserError) as caught:
        load_recipe("nvfp4", [f"grad.format={name}"])
    assert str(caught.value) == f"nvfp4.yaml: configs.nvfp4.grad.format: unknown format {end}"
