"""The example of docs/research/extending.md, taken from the page and run in a folder of its own."""

import math
import re
import shutil
import tomllib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests import processes

ROOT = Path(__file__).parents[2]
BLOCK = 32
DRAWS = 4096


class Page(NamedTuple):
    """The code blocks of docs/research/extending.md."""

    module: str
    recipe: str
    command: str
    usage: str
    project: str


@pytest.fixture(scope="module")
def page() -> Page:
    text = (ROOT / "docs" / "research" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "yaml", "sh", "python", "toml"]
    module, recipe, command, usage, project = (code for _, code in blocks)
    return Page(module, recipe, command.strip(), usage, project)


@pytest.fixture(scope="module")
def run_code(start_script) -> Callable[[Path, str], str]:
    """Function that runs code in a folder, where packages are found as well; returns its output."""

    def run(folder: Path, code: str) -> str:
        script, output = folder / "script.py", folder / "output.txt"
        there = f"import os\nos.chdir({str(folder)!r})\n"
        script.write_text(f"{there}import megatron_lowbit as m\n{code}")
        (exit_code,) = processes.finish([start_script(script, output=output)], timeout=300)
        assert exit_code == 0, output.read_text()
        return output.read_text()

    return run


def recipes_command(*arguments: str) -> str:
    """Return code that runs ``lowbit-recipes``."""
    return f"from megatron_lowbit.recipes.command import main\nmain({list(arguments)})\n"


@pytest.fixture(scope="module")
def extended(page, tmp_path_factory) -> Path:
    """A folder with the page's module and recipe."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "mxint8.py").write_text(page.module, encoding="utf-8")
    (folder / "mxint8.yaml").write_text(page.recipe, encoding="utf-8")
    return folder


def steps_of(value: float, exponent: int) -> Fraction:
    """Return a value in steps of 2**-6 of its block's scale, saturated."""
    steps = Fraction(value) / Fraction(2) ** exponent * 64
    return max(min(steps, Fraction(127)), Fraction(-127))


def expected(row: list[float]) -> tuple[list[int], list[int], list[Fraction]]:
    """Return codes, scale bytes and values of a row, exactly; round() is half-to-even."""
    codes, scales, values = [], [], []
    for start in range(0, len(row), BLOCK):
        block = row[start : start + BLOCK]
        amax = max(map(abs, block))
        exponent = -127 if amax == 0 else max(-127, math.frexp(amax)[1] - 1)
        scales.append(exponent + 127)
        codes += [round(steps_of(value, exponent)) for value in block]
        values += [Fraction(code, 64) * Fraction(2) ** exponent for code in codes[start:]]
    return codes, scales, values


def cases() -> Tensor:
    """Return rows of 3 blocks, the last one ragged: random values, and hard ones for INT8."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(24, 90, generator=random) * 2.0 ** torch.randint(
        -30, 30, (24, 1), generator=random
    )
    x[0] = 0.0
    x[1, :8] = torch.tensor([1.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0]) / 64  # ties
    x[1, 8:BLOCK] = 0.0
    x[1, 9] = 1.0
    x[2, :4] = torch.tensor([255.0, -255.0, 254.0, 128.0]) / 128  # above 127/64: saturates
    x[2, 4:BLOCK] = 0.0
    x[3] = 2.0**-128  # a scale below 2**-127 does not exist
    x[4] = 3.0e38 * (torch.arange(90) % 3 - 1)
    return x


@pytest.mark.slow
def test_unknown_without_the_recipe(extended, run_code):
    """A file next to a recipe is not run unless a recipe that is loaded names it."""
    code = "import torch\nm.load_recipe('nvfp4')\n"
    code += "try:\n    m.quantize(torch.ones(4, 32), 'mxint8')\n"
    code += "except ValueError as error:\n    print(error)\n"
    assert "unknown format 'mxint8'" in run_code(extended, code)


@pytest.mark.slow
def test_an_entry_point(page, extended, tmp_path, run_code):
    """An installed package is a folder with metadata; its formats need no recipe."""
    (tmp_path / "my_package").mkdir()
    shutil.copy(extended / "mxint8.py", tmp_path / "my_package")
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(page.project)["project"]["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(lines))
    code = "import sys, torch\nm.load_recipe('nvfp4')\nprint('my_package' in sys.modules)\n"
    code += "print(m.quantize(torch.ones(4, 32), 'mxint8').codes[0, 0].item())\n"
    assert run_code(tmp_path, code).split() == ["False", "64"]
    (tmp_path / "mine.yaml").write_text(page.recipe.replace("formats: [mxint8.py]\n", ""))
    shown = run_code(tmp_path, recipes_command("show", "mine.yaml"))
    assert "wgrad  grad     mxint8 SR" in shown


def test_a_saved_tensor(extended, run_code):
    """Another process loads it once it has read the recipe, wherever the recipe lies."""
    made = "import torch\nm.load_recipe('mxint8.yaml')\n"
    run_code(extended, made + "torch.save(m.quantize(torch.ones(4, 32), 'mxint8'), 'q.pt')")
    moved = extended / "moved"
    moved.mkdir()
    for name in ("mxint8.py", "mxint8.yaml", "q.pt"):
        shutil.copy(extended / name, moved)
    loaded = run_code(moved, made + "print(torch.load('q.pt').dequantize().sum().item())")
    assert loaded == "128.0\n"


@pytest.fixture(scope="module")
def quantized(extended, run_code) -> dict[str, Tensor]:
    """Results for :func:`cases`, and for one row many times over."""
    torch.save((cases(), cases()[5, :BLOCK].expand(DRAWS, -1)), extended / "cases.pt")
    run_code(
        extended,
        """
import torch
m.load_recipe("mxint8.yaml")
x, row = torch.load("cases.pt")
q = m.quantize(x, "mxint8")
seed = torch.Generator().manual_seed(3)
draws = m.quantize(row, "mxint8", rounding="stochastic", generator=seed)
special = torch.ones(3, 96)
special[0, 1], special[1, 40] = torch.nan, -torch.inf
y = torch.randn(70, 100)
square = m.quantize(y, "mxint8-2d")
result = {
    "codes": q.codes, "scales": q.scales, "values": q.dequantize(), "nbytes": q.nbytes,
    "draws": draws.codes, "special": m.quantize(special, "mxint8").dequantize(),
    "square_scales": square.scales, "square": square.dequantize(),
    "transpose": square.transpose().dequantize(),
    "empty": m.quantize(torch.empty(0, 64), "mxint8").dequantize(),
}
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.numerics import Quantizer, Request, format_by_name
request = Request(Quantizer(format_by_name("mxint8")))
left, _ = FusedEngine((9, 0)).quantize(x, request, None)
result["on a GPU"] = left.dequantize()
result["product"] = FusedEngine((9, 0)).gemm(left, left)
torch.save(result, "result.pt")
""",
    )
    return torch.load(extended / "result.pt")


def test_a_gpu_needs_no_kernel(quantized):
    """Its engine quantizes by the reference, and multiplies what it dequantizes."""
    row = quantized["on a GPU"]
    assert torch.equal(row, quantized["values"])
    torch.testing.assert_close(quantized["product"], row @ row.T)


def test_quantize_nearest(quantized):
    codes, scales = quantized["codes"], quantized["scales"]
    assert codes.dtype == torch.int8 and scales.dtype == torch.uint8
    assert quantized["nbytes"] == 24 * 96 + 24 * 3 + 4
    for number, row in enumerate(cases().tolist()):
        want_codes, want_scales, want_values = expected(row)
        assert codes[number, : len(row)].tolist() == want_codes
        assert scales[number].tolist() == want_scales
        assert [Fraction(value) for value in quantized["values"][number].tolist()] == want_values


def test_quantize_stochastic(quantized):
    """Every draw is one of the two neighbours, and their mean is the value."""
    x, codes = cases()[5, :BLOCK], quantized["draws"].double()
    exponent = math.frexp(float(x.abs().max()))[1] - 1
    steps = torch.tensor([float(steps_of(value, exponent)) for value in x.tolist()])
    assert ((codes == steps.floor()) | (codes == steps.ceil())).all()
    up = steps - steps.floor()
    error = (up * (1 - up) / DRAWS).sqrt()
    assert ((codes.mean(0) - steps).abs() <= 4 * error).all()
    assert (up > 0).sum() > BLOCK / 2


def test_special_values(quantized):
    special = quantized["special"]
    blocks = special[0, :BLOCK], special[1, BLOCK : 2 * BLOCK]  # with a NaN, with an infinity
    assert all(block.isnan().all() for block in blocks) and special.isnan().sum() == 2 * BLOCK
    assert quantized["empty"].shape == (0, 64)


def test_square_blocks(quantized):
    assert (quantized["square_scales"][:BLOCK] == quantized["square_scales"][0]).all()
    assert torch.equal(quantized["transpose"], quantized["square"].T)


def test_show(page, extended, run_code):
    program, *arguments = page.command.split()
    assert program == "lowbit-recipes"
    shown = run_code(extended, recipes_command(*arguments))
    assert "recipe mxint8: 44 of 48 linear layers quantized" in shown
    rows = [line.split()[-4:] for line in shown.splitlines()]
    for row in ("fprop input mxint8 8.25", "fprop weight mxint8-2d 8.25", "grad mxint8 SR 8.25"):
        assert row.split() in rows


@pytest.mark.slow
def test_lowbit_linear(page, extended, run_code):
    """The page's lines, and the same bits from the compiled engine and the reference."""
    printed = run_code(
        extended,
        "import torch\ntorch.manual_seed(1)\n"
        + page.usage
        + """
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext
def dense(t, name):
    return quantize(t.detach(), name).dequantize()
torch.testing.assert_close(y, dense(x, "mxint8") @ dense(weight, "mxint8-2d").T)
exact = [t.detach().requires_grad_() for t in (x, weight)]
(exact[0] @ exact[1].T).square().mean().backward()
for low, high in zip((x, weight), exact):
    error = (low.grad - high.grad).norm() / high.grad.norm()
    assert 0 < error < 0.03, error
def results(engine):
    a, b = (t.detach().requires_grad_() for t in (x, weight))
    y = lowbit_linear(a, b, LinearContext(precision, engine, 5))
    y.square().mean().backward()
    return y, a.grad, b.grad
for one, other in zip(results(select_engine(x.device)), results(ReferenceEngine("test"))):
    assert torch.equal(one, other)
""",
    )
    lines = printed.splitlines()  # among warnings of the compiler
    stated = float(re.search(r"# about ([\d.]+)$", page.usage, re.MULTILINE)[1])
    assert "torch.int8" in lines
    assert float(lines[-1].split()[-1]) == pytest.approx(stated, rel=0.1)
