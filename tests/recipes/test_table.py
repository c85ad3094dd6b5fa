"""Tables of a recipe's effect on a model: ``show`` and the lines printed at start."""

import io

import pytest
from rich.console import Console

from megatron_lowbit.numerics import FORMATS
from megatron_lowbit.recipes import Layer, load_recipe, precision_table, shipped_recipes
from megatron_lowbit.recipes.show import model_layers
from megatron_lowbit.recipes.table import line_table

NAMES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
EVERY = ", ".join(NAMES)
HIGH = [
    ("fprop", "input", "bf16", "16"),
    ("fprop", "weight", "bf16", "16"),
    ("dgrad", "grad", "bf16", "16"),
    ("dgrad", "weight", "bf16", "16"),
    ("wgrad", "grad", "bf16", "16"),
    ("wgrad", "input", "bf16", "16"),
]
NVFP4 = [
    ("fprop", "input", "nvfp4", "4.5"),
    ("fprop", "weight", "nvfp4-2d", "4.5"),
    ("dgrad", "grad", "nvfp4 SR", "4.5"),
    ("dgrad", "weight", "nvfp4-2d", "4.5"),
    ("wgrad", "grad", "nvfp4 SR", "4.5"),
    ("wgrad", "input", "nvfp4", "4.5"),
    ("wgrad", "both", "RHT-16", ""),
]


def model(blocks):
    return [Layer(f"decoder.layers.{b}.{name}", b, blocks) for b in range(blocks) for name in NAMES]


def cells(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def groups(recipe, layers):
    """Return blocks, layers and matcher of each group, without its operands."""
    return list(dict.fromkeys(row[:3] for row in cells(line_table(recipe, layers))))


def printed(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()


# Groups


def test_equal_blocks_go_together():
    recipe = load_recipe("nvfp4")
    assert cells(line_table(recipe, model(8))) == [
        *(("0, 7", EVERY, "bf16_blocks", *row) for row in HIGH),
        *(("1-6", EVERY, "linears", *row) for row in NVFP4),
    ]


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
    "int4-1x32": 4.5, "int4-1x128": 4.125, "fp8-tensor-e5m2": 8,
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
            "\n ".join(["bf16_blocks, blocks 0, 7:", *NAMES]),
            "fprop\n\ndgrad\n\nwgrad\n",
            *("\n".join(row[column] for row in HIGH) for column in (1, 2, 3)),
        ),
        (
            "\n ".join(["linears, blocks 1-6:", *NAMES]),
            "fprop\n\ndgrad\n\nwgrad\n\n",
            *("\n".join(row[column] for row in NVFP4) for column in (1, 2, 3)),
        ),
    ]


@pytest.mark.parametrize("pattern", [None, "M-M*-M-M*-"])
@pytest.mark.parametrize("name", shipped_recipes())
def test_80_columns_suffice(name, pattern):
    """Each format and each number of bits is whole, each beside its own operand."""
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
