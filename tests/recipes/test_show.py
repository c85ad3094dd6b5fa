"""``python -m megatron_lowbit.recipes``: tables of a recipe's effect on a model, and exits."""

import io
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
from rich.console import Console

from megatron_lowbit.numerics import FORMATS
from megatron_lowbit.recipes import Layer, load_recipe, precision_table, shipped_recipes
from megatron_lowbit.recipes.command import main
from megatron_lowbit.recipes.show import line_table, model_layers
from tests.marks import by_turns
from tests.recipes.conftest import refused

NAMES = {
    "attention": ["self_attention.linear_qkv", "self_attention.linear_proj"],
    "mlp": ["mlp.linear_fc1", "mlp.linear_fc2"],
    "mamba": ["mixer.in_proj", "mixer.out_proj"],
}
MXNORM = ("--normalization", "MXNorm")
LATE = "{fraction: 0.8, to: bf16, part: forward}"
SHORT = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
EVERY = ", ".join(SHORT)
OPERANDS = [("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad"), ("dgrad", "weight"),
            ("wgrad", "grad"), ("wgrad", "input")]  # fmt: skip
HIGH = [(*operand, "bf16", "16") for operand in OPERANDS]
FORMATS_OF_NVFP4 = ("nvfp4", "nvfp4-2d", "nvfp4 SR", "nvfp4-2d", "nvfp4 SR", "nvfp4")
HOPPER = (
    (r"fp8-.*|mxfp.*|nvfp4-fold", "FP8"), (r"if4|qat-int4-.*", "FP32"),
    (r"nemotron3-super|nvfp4-backward|qat-(?:fp8|mxfp).*-activations", "BF16, FP8"),
)  # fmt: skip
"""Number formats of GEMMs on an H100 by names of recipes; of all other recipes it is BF16."""
NVFP4 = [
    *(
        (*operand, format, "4.5")
        for operand, format in zip(OPERANDS, FORMATS_OF_NVFP4, strict=True)
    ),
    ("wgrad", "both", "RHT-16", ""),
]


def model(blocks):
    return [Layer(f"decoder.layers.{b}.{name}", b, blocks) for b in range(blocks) for name in SHORT]


def cells(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def groups(recipe, layers):
    """Return blocks, layers and matcher of each group, without its operands."""
    return list(dict.fromkeys(row[:3] for row in cells(line_table(recipe, layers))))


def printed(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()


def shown(*arguments, capsys):
    """Return the cells of each line that a command prints into a pipe."""
    main(arguments)
    return [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]


# Models


def test_gpt_layers():
    layers = model_layers(None, 3)
    assert [layer.path for layer in layers] == [
        f"decoder.layers.{block}.{name}"
        for block in range(3)
        for kind in ("attention", "mlp")
        for name in NAMES[kind]
    ]
    assert [layer.block for layer in layers] == [0] * 4 + [1] * 4 + [2] * 4
    assert {layer.num_blocks for layer in layers} == {3}
    assert [layer.kind for layer in layers] == ["attention", "attention", "mlp", "mlp"] * 3


def test_hybrid_layers():
    """A block a symbol, two linears each; the number of layers is the pattern's."""
    layers = model_layers("M*-M", 99)
    kinds = ["mamba", "attention", "mlp", "mamba"]
    assert [layer.path for layer in layers] == [
        f"decoder.layers.{block}.{name}" for block, kind in enumerate(kinds) for name in NAMES[kind]
    ]
    assert [(layer.block, layer.kind) for layer in layers[::2]] == list(enumerate(kinds))
    assert {layer.num_blocks for layer in layers} == {4}


@pytest.mark.parametrize(
    "pattern, number, parts",
    [
        ("MX-", 4, ["'X'", "M, *, +, -, E"]),
        ("M/X", 4, ["'X'"]),
        ("M*/M/*", 4, ["predictions", "M*/M/*", "equal"]),
        ("/M", 4, ["one layer"]),
        ("M/" + "M" * 500, 4, ["at most 400"]),
        ("", 4, ["one layer"]),
        (None, 0, ["one layer"]),
        (None, 10**12, ["at most 400"]),
    ],
)
def test_no_such_model(pattern, number, parts):
    refused(model_layers, pattern, number, parts=parts)


@pytest.mark.parametrize("pattern", ["M*/", "M|*", "M*//"])
def test_borders_that_are_no_blocks(pattern):
    assert model_layers(pattern, 1) == model_layers("M*", 1)


# Tables


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_a_hybrid_and_means(flag, capsys):
    """mxfp4 keeps 2 of 4 blocks: the mean is (2 x 4.25 + 2 x 16) / 4 = 10.125."""
    lines = shown("show", "mxfp4", flag, "M-M*", capsys=capsys)
    assert lines[0] == ["recipe mxfp4: 4 of 8 linear layers quantized"]
    assert lines[1] == ["blocks", "linear layers", "matcher", "GEMM", "operand", "format", "bits"]
    assert lines[-1] == ["mean bits per element: fprop 10.1, dgrad 10.1, wgrad 10.1"]
    assert ["0", "mixer.in_proj, mixer.out_proj", "bf16_blocks", *HIGH[0]] in lines
    row = ["1", "mlp.linear_fc1, mlp.linear_fc2", "linears", "fprop", "input"]
    assert [*row, "mxfp4 rceil", "4.25"] in lines


@pytest.mark.parametrize(
    ("name", "high"), [("hybrid-12b", "20 of 124"), ("hybrid-8b", "16 of 104")]
)
def test_a_model_that_says_which_blocks_stay_in_bf16(name, high, capsys):
    """The paper's counts of linear layers in BF16 (section 4.1 and appendix A), for NVFP4 only."""
    file = str(Path(__file__).parents[2] / "examples" / f"{name}.args")
    kept, whole = map(int, high.split(" of "))
    for recipe, quantized in (("nvfp4", whole - kept), ("mxfp8", whole)):
        title = " ".join(shown("show", recipe, "--model", file, capsys=capsys)[0])
        assert f"{quantized} of {whole} linear layers quantized" in title


def test_a_hybrid_from_a_preset(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = shown("show", "nvfp4", "--hybrid-layer-pattern", "M-M*-M-M-M-M-", capsys=capsys)
    for file in ("examples/hybrid-tiny.args", "@examples/hybrid-tiny.args"):
        assert shown("show", "nvfp4", "--model", file, capsys=capsys) == expected


def test_combined_with_overrides(capsys):
    lines = shown(
        "show", "mxfp4-backward", "--forward", "fp8-tile", "--num-layers", "2",
        "--recipe-set", "backward.wgrad.hadamard.size=32", "--recipe-set", "forward.weight=null",
        capsys=capsys,
    )  # fmt: skip
    rows = [line[3:] for line in lines if len(line) > 3]
    assert rows[1:3] == [["fprop", "input", "fp8-1x128-e4m3 pow2", "8.25"], [*HIGH[1]]]
    assert ["wgrad", "both", "RHT-32 fp32 signs fresh"] in rows
    assert {line[2] for line in lines if len(line) > 3} == {"matcher", "linears / linears"}


def test_where_mxnorm_is_active(capsys):
    """In attention and MLPs that are quantized: nvfp4 keeps 1 + 2 of 12 blocks."""
    lines = shown("show", "nvfp4", *MXNORM, capsys=capsys)
    names = "self_attention.linear_qkv, mlp.linear_fc1"
    marked = [line for line in lines if "of MXNorm" in line]
    assert marked == [["1-9", names, "linears", "fprop", "input", "of MXNorm"]]
    assert "of MXNorm" not in str(shown("show", "nvfp4", capsys=capsys))


def read_to_the_end(terminal: int) -> bytes:
    text = b""
    with suppress(OSError):  # the end of a pseudo-terminal
        while part := os.read(terminal, 4096):
            text += part
    return text


def test_list(capsys):
    heading, *rows, last = shown("list", capsys=capsys)
    assert heading == ["recipe", "use", "GEMMs on H100, H200", "description"]
    assert last == ["loss gaps and speeds: docs/choose-a-recipe.md in the repository"]
    assert [(name, text) for name, _, _, text in rows] == [
        (name, load_recipe(name).description) for name in shipped_recipes()
    ]
    for name, use, gemms, _ in rows:
        is_qat = name.startswith("qat-")
        assert use == ("baseline" if name == "bf16" else "fine-tuning" if is_qat else "pretraining")
        assert gemms == next((gemms for part, gemms in HOPPER if re.fullmatch(part, name)), "BF16")


def test_a_terminal_of_80_columns(monkeypatch):
    """It has a table with lines; the same command in a pipe has none."""
    monkeypatch.setenv("COLUMNS", "80")
    terminal, inner = os.openpty()
    with ThreadPoolExecutor() as pool:  # a pseudo-terminal holds less than the table
        text = pool.submit(read_to_the_end, terminal)
        with open(inner, "w") as stdout, redirect_stdout(stdout):
            main(["show", "mxfp4-backward"])
    os.close(terminal)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text.result().decode()).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("────" in line for line in lines)
    assert any(line.split()[-2:] == ["signs", "fresh"] for line in lines)


# Groups


def test_equal_blocks_go_together():
    recipe = load_recipe("nvfp4")
    assert cells(line_table(recipe, model(8))) == [
        *(("0, 7", EVERY, "bf16_blocks", *row) for row in HIGH),
        *(("1-6", EVERY, "linears", *row) for row in NVFP4),
    ]


def test_a_recipe_that_quantizes_nothing_of_a_model_names_its_matchers():
    """A model of two blocks is the first and the last; bf16 has nothing to quantize."""
    assert load_recipe("nvfp4").summary(model(2)) == (
        "recipe nvfp4: 0 of 8 linear layers quantized; their matchers: bf16_blocks"
    )
    assert load_recipe("bf16").summary(model(2)).endswith("0 of 8 linear layers quantized")


def test_matchers_within_a_block_are_groups_of_their_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        """
name: mine
configs:
  low: {input: {format: nvfp4}, weight: {format: nvfp4}}
  high: {}
matchers:
  fc1: {type: glob, pattern: "*linear_fc1", config: high, enabled: true}
  middle: {type: regex, pattern: "layers.[12]", config: low, enabled: true}
"""
    )
    recipe = load_recipe(str(path))
    assert recipe.summary(model(4)) == "recipe mine: 6 of 16 linear layers quantized"
    rest = "linear_qkv, linear_proj, linear_fc2"
    assert groups(recipe, model(4)) == [
        ("0, 3", rest, "-"),
        ("1-2", rest, "middle"),
        ("0-3", "linear_fc1", "fc1"),
    ]


def test_other_layers_of_neighbouring_blocks_stay_apart(tmp_path):
    """One matcher takes fc1 of block 1 and fc2 of block 2, and no other layer of the two."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        """
name: mine
configs: {low: {input: {format: nvfp4}}}
matchers:
  some: {type: regex, pattern: "1.linear_fc1|2.linear_fc2", config: low, enabled: true}
"""
    )
    assert groups(load_recipe(str(path)), model(4)) == [
        ("0-3", "linear_qkv, linear_proj", "-"),
        ("0, 2-3", "linear_fc1", "-"),
        ("0-1, 3", "linear_fc2", "-"),
        ("1", "linear_fc1", "some"),
        ("2", "linear_fc2", "some"),
    ]


def test_a_range_of_a_hybrid_counts_blocks_with_such_layers():
    parts = {"M": ("in_proj", "out_proj"), "-": ("linear_fc1", "linear_fc2")}
    layers = [
        Layer(f"decoder.layers.{b}.{name}", b, 6)
        for b, symbol in enumerate("M-MM-M")
        for name in parts[symbol]
    ]
    assert groups(load_recipe("nvfp4"), layers) == [
        ("0, 5", "in_proj, out_proj", "bf16_blocks"),
        ("2-3", "in_proj, out_proj", "linears"),
        ("1-4", "linear_fc1, linear_fc2", "linears"),
    ]


def test_experts_have_one_name():
    paths = [f"mlp.experts.local_experts.{number}.linear_fc1" for number in range(3)]
    layers = [Layer(f"decoder.layers.{b}.{path}", b, 2) for b in range(2) for path in paths]
    assert groups(load_recipe("fp8-row"), layers) == [
        ("0-1", "mlp.experts.local_experts.*.linear_fc1", "linears")
    ]


# Operands


BITS = {
    "nvfp4": 4.5, "mxfp4": 4.25, "mxfp6-e2m3": 6.25, "mxfp6-e3m2": 6.25, "mxfp8-e4m3": 8.25,
    "mxfp8-e5m2": 8.25, "fp8-1x128-e4m3": 8.25, "fp8-1x128-e5m2": 8.25, "fp8-tensor-e4m3": 8,
    "nvfp4-ue5m3": 4.5, "quartet2": 4.5, "ms-eden": 4.5, "tetrajet2": 4 + 8 / 16 + 32 / 128,
    "if4": 4.5, "int4-1x32": 4.5, "int4-1x128": 4.125, "fp8-tensor-e5m2": 8,
    "fp8-row-e4m3": 8, "fp8-row-e5m2": 8,
    "fp8-128x128-e4m3": 8 + 32 / 128**2, "fp8-128x128-e5m2": 8 + 32 / 128**2,
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_every_format(format):
    """Its own and its share of the scale: E8M0 or E4M3 for a block's row, FP32 for a tile."""
    change = f"configs.bf16.input.format={format}"
    row, other, *_ = cells(line_table(load_recipe("bf16", [change]), model(1)))
    bits = BITS[format.removesuffix("-2d")]
    assert row[3:] == ("fprop", "input", format, f"{bits:.4g}")
    assert other[3:] == ("fprop", "weight", "bf16", "16")
    assert FORMATS[format].bits_per_element == bits


def test_bits_of_other_tiles():
    for block, narrow, square in ((64, 8.5, 8 + 32 / 64**2), (16, 10, 8.125)):
        changes = [f"{role}.block={block}" for role in ("input", "weight", "grad")]
        row, other, *_ = cells(line_table(load_recipe("fp8-tile", changes), model(1)))
        assert row[4:] == ("input", f"fp8-1x128-e4m3 pow2 block {block}", f"{narrow:.4g}")
        assert other[4:] == ("weight", f"fp8-128x128-e4m3 pow2 block {block}", f"{square:.4g}")


def test_everything_that_both_operands_share():
    recipe = load_recipe(
        "fp8-delayed",
        ["dgrad.hadamard={size: 64, signs: fresh}", "wgrad.accumulation={inner: fp8}"],
    )
    rows = cells(line_table(recipe, model(1)))
    assert [(row[3], row[5]) for row in rows if row[4] == "both"] == [
        ("fprop", "delayed max-16"),
        ("dgrad", "RHT-64 signs fresh"),
        ("dgrad", "delayed max-16"),
        ("wgrad", "delayed max-16"),
        ("wgrad", "fp8 sums of 128"),
    ]


# On a terminal


def test_a_terminal_has_a_row_a_group():
    rows = cells(precision_table(load_recipe("nvfp4"), model(8)))
    assert rows == [
        (
            "\n ".join(["bf16_blocks, blocks 0, 7:", *SHORT]),
            "fprop\n\ndgrad\n\nwgrad\n",
            *("\n".join(row[column] for row in HIGH) for column in (1, 2, 3)),
        ),
        (
            "\n ".join(["linears, blocks 1-6:", *SHORT]),
            "fprop\n\ndgrad\n\nwgrad\n\n",
            *("\n".join(row[column] for row in NVFP4) for column in (1, 2, 3)),
        ),
    ]


@pytest.mark.parametrize(("name", "pattern"), by_turns(shipped_recipes(), [None, "M-M*-M-M*-"]))
def test_80_columns_suffice(name, pattern):
    """Each format and each number of bits is whole, in the line of its operand."""
    recipe, layers = load_recipe(name), model_layers(pattern, 12)
    lines = printed(precision_table(recipe, layers), 80)
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    for row in cells(line_table(recipe, layers)):
        operand = [*row[4:5], *row[5].split(), *filter(None, row[6:])]
        assert any(line[-len(operand) :] == operand for line in words), operand
    for layer in layers:
        name = layer.path.split(".", 3)[3]
        assert any(line[:1] == [name] for line in words), name
    assert not any("…" in line for line in lines)


# Exits


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["command"]),
        (["print"], ["'print'"]),
        (["show"], ["NAME_OR_FILE"]),
        (["show", "nvfp5"], ["'nvfp5'", "nvfp4"]),
        (["show", "nvfp4", "--num-layers", "x"], ["--num-layers", "'x'"]),
        (["show", "nvfp4", "--num-layers", "-1"], ["one layer"]),
        (["show", "nvfp4", "--layers", "3"], ["--layers"]),
        (["show", "nvfp4", "--model", "x.args", "--num-layers", "3"], ["--num-layers has no eff"]),
        (["show", "nvfp4", "--hybrid-layer-pattern", "M*", "--num-layers", "3"], ["no effect"]),
        (["show", "nvfp4", "--q-lora-rank", "3"], ["--q-lora-rank has no effect", "+"]),
        (["show", "nvfp4", "--num-layers-at-end-in-bf16", "3"], ["needs --first-last-layers-bf16"]),
        (["show", "nvfp4", "--normalization", "mxnorm"], ["--normalization", "'mxnorm'"]),
        (["show", "nvfp4", "--hybrid-layer-pattern", "MG"], ["'G'", "M, *, +, -, E"]),
        (["show", "nvfp4", "--recipe-set", "grad.x=1"], ["configs.nvfp4.grad.x"]),
        (["show", "nvfp4", "--recipe-set", "bf16_blocks.numbers=[40]"], ["block 40", "0 to 11"]),
        (["show", "nvfp4", "--forward", "mxfp8", "--recipe-set", "grad=null"], ["forward.grad"]),
        (["show", "bf16", *MXNORM], ["MXNorm", "bf16 quantizes none"]),
        (["show", "fp8-delayed", *MXNORM], ["linear_qkv: ", "mxfp8-e4m3"]),
        (["show", "nvfp4", *MXNORM, "--recipe-set", "configs.bf16.accumulation.inner=bf16"],
         ["layers.0.", "is not quantized"]),
        (["show", "mxfp8", *MXNORM, "--recipe-set", f"switches.late={LATE}"],
         ["(switch late: from fraction 0.8 on, forward by bf16): ", "mxfp8-e4m3"]),
    ],
)  # fmt: skip
def test_bad_input(arguments, parts):
    refused(main, arguments, parts=parts)


def test_an_error_exits_with_2():
    """As a command: 2 and one line on stderr, nothing on stdout."""
    command = [sys.executable, "-m", "megatron_lowbit.recipes", "show", "mxfp4-backward"]
    bad = subprocess.run([*command, "--num-layers", "two"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1


def test_a_pipe_has_whole_names(capsys, monkeypatch):
    """Whatever the environment says of a terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["show", "mxfp4-backward"])
    out, err = capsys.readouterr()
    assert not err and "\x1b" not in out and out.isascii()
    every = "self_attention.linear_qkv, self_attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2"
    assert f"0-11    {every}  linears  dgrad  grad     mxfp4 three_quarters SR" in out
