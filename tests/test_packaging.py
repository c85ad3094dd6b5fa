"""Installation: the commands, the wheel and its contents, and that it trains by itself."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings

import megatron_lowbit
from megatron_lowbit.arguments import front_parser
from megatron_lowbit.arguments.precision import INSTALL_TRANSFORMER_ENGINE
from tests.torch_index import WITHOUT_OTHERS, index_of_torch

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = PROJECT["scripts"]
LAYERS = "--num-layers 2"
TINY = "--hidden-size 64 --num-attention-heads 4 --seq-length 32"
TINY += " --max-position-embeddings 32 --micro-batch-size 2 --train-iters 20 --lr 1e-3"
TINY += " --data-path data --split 60,40,0 --eval-iters 1 --eval-interval 20"
TINY += " --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer"


def test_one_version():
    version = PROJECT["version"]
    assert megatron_lowbit.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_extras():
    """The versions that an error names equal the extras', all of which are pinned."""
    extras = PROJECT["optional-dependencies"]
    assert INSTALL_TRANSFORMER_ENGINE.endswith(f"'{extras['te'][0]}'")
    assert all("==" in requirement for requirement in extras["te"] + extras["mamba"])
    assert [name.partition("==")[0] for name in extras["mamba"]] == ["causal-conv1d", "mamba-ssm"]
    assert set(extras["liger"]) < set(extras["test"])


def test_one_ruff():
    """The versions of ``make test`` and of a commit's hooks."""
    pinned = re.search(r"^ruff==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    assert f"[{pinned}]" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_random_examples_repeat_in_make_test_and_are_new_in_test_all():
    """A profile of the command decides, and no test file for itself."""
    assert settings.get_profile("repeat").derandomize
    recipe = re.search(r"^test-all: .*\n(\t.*\n)+", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert '-m "slow or hypothesis"' in recipe[0]
    profile = re.search(r"--hypothesis-profile (\w+)", recipe[0])[1]
    assert not settings.get_profile(profile).derandomize
    for file in (ROOT / "tests").glob("*/test_*.py"):
        assert "derandomize=" not in file.read_text(), file


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a console script's function in this process: exit code, output, errors."""

    def run(name: str, *arguments: str) -> tuple[int, str, str]:
        module, _, function = COMMANDS[name].partition(":")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            getattr(import_module(module), function)()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, command):
    code, output, _ = command(name, "--help")
    assert code == 0 and output.startswith("usage: ")
    names = re.search(r"^  \{([\w,-]+)\}$", output, re.MULTILINE)
    for subcommand in names[1].split(",") if names else ():
        code, text, _ = command(name, subcommand, "--help")
        summary = re.search(rf"^    {subcommand} +(.*)$", output, re.MULTILINE)[1]
        assert f"\n\n{summary[0].upper()}{summary[1:]}" in text


def test_slow_imports_wait():
    """Importing the package or its errors, or printing a light command's help, loads little.

    Help then takes less than half a second.
    """
    heavy = {"torch", "transformers", "megatron", "matplotlib", "pydantic"}
    light = ["tokenizer", "preprocess", "convert", "checkpoint", "study", "plan", "recipes"]
    code = f"""
import contextlib, io, sys
import megatron_lowbit, megatron_lowbit.errors
assert "importlib.metadata" not in sys.modules
from megatron_lowbit import commands
sys.argv = ["lowbit", "--help"]
for name in {light}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        getattr(commands, name)()
    slow = {heavy}.intersection(sys.modules)
    assert not slow, (name, slow)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_argument_is_one_line(name, command):
    code, _, errors = command(name, "--no-such-argument")
    assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_the_version(name, command):
    assert command(name, "--version")[:2] == (0, f"megatron-lowbit {PROJECT['version']}\n")


def test_help_of_training():
    """Help of this project's own arguments, and of those without which no run starts."""
    parser = front_parser()
    own = next(group for group in parser._action_groups if group.title == "megatron-lowbit")
    assert len(own._group_actions) >= 10
    for action in own._group_actions:
        assert action.help, f"{action.option_strings} has no help"
    usage = parser.format_usage().replace("\n", " ")
    for flag in [LAYERS.split()[0], *TINY.split()[:16:2]]:
        assert f" {flag} " in usage


@pytest.mark.parametrize("name", ["lowbit-pretrain", "lowbit-recipes", "lowbit-convert"])
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion(name, command):
    """Bash completes an option, of a subcommand, too."""
    code, script, _ = command(name, "--print-completion", "bash")
    assert code == 0
    words = {"lowbit-pretrain": "--precision-r", "lowbit-recipes": "show --hybrid-l",
             "lowbit-convert": "to-megatron --ver"}[name].split()  # fmt: skip
    line = " ".join([name, *words])
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; COMP_LINE='{line}'\n"
    ask += f"_shtab_{name.replace('-', '_')} {name} {words[-1]} {name}; echo ${{COMPREPLY[@]}}"
    result = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True
    )
    completed = {"--precision-r": "--precision-recipe", "--hybrid-l": "--hybrid-layer-pattern",
                 "--ver": "--verify --verify-tokens"}  # fmt: skip
    assert result.stdout.strip() == completed[words[-1]]


def check_description(text: str) -> None:
    """Assert that it is README's, without links or pictures that lead nowhere from elsewhere."""
    assert "## Your Megatron-LM script" in text and "docs/megatron-lm.md" in text
    assert "docs/images" not in text
    assert all(target.startswith("http") for target in re.findall(r"\]\(([^)]*)", text))


def test_description(monkeypatch):
    """setup.py gives it, which a build reads."""
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **settings: given.update(settings))
    runpy.run_path(str(ROOT / "setup.py"))
    check_description(given["long_description"])
    assert PROJECT["dynamic"] == ["readme"]


@pytest.mark.slow
def test_distributions(built):
    """Both hold the package and its data; the source distribution also what tests and shows it."""
    package = {
        str(path.relative_to(ROOT))
        for pattern in (
            "**/*.py",
            "examples/*.args",
            "planning/*.yaml",
            "recipes/shipped/*.yaml",
            "py.typed",
        )
        for path in (ROOT / "megatron_lowbit").glob(pattern)
    }
    assert "megatron_lowbit/recipes/shipped/nvfp4.yaml" in package
    assert "megatron_lowbit/examples/gpt-7m-cpu.args" in package
    packed = zipfile.ZipFile(next(built.glob("*.whl")))
    wheel = set(packed.namelist())
    assert {name for name in wheel if ".dist-info/" not in name} == package
    folder = f"megatron_lowbit-{PROJECT['version']}.dist-info"
    assert {f"{folder}/licenses/LICENSE", f"{folder}/licenses/NOTICE"} <= wheel
    check_description(packed.read(f"{folder}/METADATA").decode())
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    more = {
        "Makefile", "constraints.txt", "pretrain_gpt.py", "tools/plot_loss.py",
        "recipes/nvfp4.yaml", "docs/images/results.png", "examples/gpt-7m-cpu.args",
        "tests/golden/quantizers.npz",
    }  # fmt: skip
    assert package | more <= source


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_completion_of_fish(name, command, tmp_path):
    _, script, _ = command(name, "--print-completion", "fish")
    (tmp_path / "script.fish").write_text(script)
    ask = f'source {tmp_path}/script.fish; complete --do-complete "{name} --print-c"'
    result = subprocess.run(["fish", "-N", "-c", ask], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("--print-completion\t") and not result.stderr


@pytest.mark.slow
def test_installation_without_cuda(built, tmp_path):
    """The commands of docs/quickstart.md, on an index in which torch is an empty package."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    first, second = re.findall(r"^pip (install .*?)(?:  .*)?$", page, re.MULTILINE)[:2]
    source = "https://download.pytorch.org/whl/cpu"
    assert source in first and second == "install ."
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip = [str(tmp_path / "venv" / "bin" / "python"), "-m", "pip"]
    index = first.replace(source, index_of_torch(tmp_path / "index", "2.13.0+cpu"))
    subprocess.run([*pip, *index.split()], check=True, env=os.environ | WITHOUT_OTHERS)
    report, wheel = tmp_path / "report.json", str(next(built.glob("*.whl")))
    resolve = [*pip, "install", "--dry-run", "--quiet", "--report", str(report), wheel]
    subprocess.run(resolve, check=True)
    packages = {entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]}
    assert {"transformers", "megatron-lowbit"} <= packages
    assert not [name for name in packages if re.match(r"torch$|triton|nvidia|cuda", name)]


@pytest.mark.slow
def test_the_wheel_trains_by_itself(installed):
    """Text, tokenizer, dataset, training on one and on two ranks, and back, in an empty folder."""

    def lowbit(name: str, arguments: str) -> str:
        return installed(f"lowbit-{name}", *arguments.split())

    text = Path(sysconfig.get_path("stdlib")) / "json"
    lowbit("tokenizer", f"--input {text} --pattern *.py --vocab-size 300 --output tokenizer")
    lowbit("preprocess", f"--input {text} --pattern *.py --tokenizer-model tokenizer "
           "--output-prefix data")  # fmt: skip
    output = lowbit(
        "pretrain", f"--fp4-recipe nvfp4 --recipe-set bf16_blocks=none {LAYERS} {TINY} "
        "--save run --save-interval 20"
    )  # fmt: skip
    assert "checkpoint run, loss curve run/loss.png" in output
    hybrid = "--hybrid-layer-pattern M- --mamba-num-groups 1 --position-embedding-type none"
    output = lowbit("pretrain", f"--precision-recipe fp8-tile {TINY} {hybrid}")
    assert "linear layers quantized" in output and "validation loss at iteration 20" in output
    ranks = "-m torch.distributed.run --standalone --nproc-per-node 2 --no-python"
    parallel = f"--fp4-recipe nvfp4 --recipe-set bf16_blocks=none {LAYERS} {TINY} "
    parallel += "--tensor-model-parallel-size 2"
    output = installed("python", *ranks.split(), "lowbit-pretrain", *parallel.split())
    assert "validation loss" in output
    assert "nvfp4" in lowbit("recipes", "list")
