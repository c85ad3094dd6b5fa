"""``python -m megatron_lowbit.recipes``: tables of what a recipe does to a model, and exits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import FORMATS
from megatron_lowbit.recipes import load_combined, load_recipe, shipped_recipes, show
from megatron_lowbit.recipes.command import main

GPT = ["attention", "attention", "mlp", "mlp"]
NAMES = {
    "attention": ["self_attention.linear_qkv", "self_attention.linear_proj"],
    "mlp": ["mlp.linear_fc1", "mlp.linear_fc2"],
    "mamba": ["mixer.in_proj", "mixer.out_proj"],
}


def cells(recipe, layers):
    table = show.resolved_table(recipe, layers)
    return list(zip(*(column.cells for column in table.columns), strict=True))


def shown(*arguments, capsys):
    """Return what a command prints, line by line, without box drawing."""
    main(arguments)
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in lines]


# Models


def test_gpt_layers():
    layers = show.model_layers(None, 3)
    assert [layer.path for layer in layers] == [
        f"decoder.layers.{block}.{name}"
        for block in range(3)
        for kind in ("attention", "mlp")
        for name in NAMES[kind]
    ]
    assert [layer.block for layer in layers] == [0] * 4 + [1] * 4 + [2] * 4
    assert {layer.num_blocks for layer in layers} == {3}
    assert [layer.kind for layer in layers] == GPT * 3


def test_hybrid_layers():
    """A block a symbol, two linears each; the number of layers is the pattern's."""
    layers = show.model_layers("M*-M", 99)
    kinds = ["mamba", "attention", "mlp", "mamba"]
    assert [layer.path for layer in layers] == [
        f"decoder.layers.{block}.{name}" for block, kind in enumerate(kinds) for name in NAMES[kind]
    ]
    assert [(layer.block, layer.kind) for layer in layers[::2]] == list(enumerate(kinds))
    assert {layer.num_blocks for layer in layers} == {4}


@pytest.mark.parametrize(
    "pattern, number, parts",
    [
        ("MX-", 4, ["'X'", "M, *, -"]),
        ("", 4, ["one layer"]),
        (None, 0, ["one layer"]),
        (None, 10**12, ["at most 400"]),
    ],
)
def test_no_such_model(pattern, number, parts):
    with pytest.raises(UserError) as caught:
        show.model_layers(pattern, number)
    for part in parts:
        assert part in str(caught.value)


# Tables


def test_three_rows_a_layer():
    """The layer and its matcher once, then each GEMM's operands, bits, and what both share."""
    layers = show.model_layers(None, 3)
    rows = cells(load_recipe("nvfp4"), layers)
    assert len(rows) == 3 * len(layers)
    for number, layer in enumerate(layers):
        first, *others = rows[3 * number : 3 * number + 3]
        edge = layer.block in (0, 2)
        assert first[:2] == (layer.path, "bf16_blocks" if edge else "linears")
        assert [row[:2] for row in others] == [("", "")] * 2
        assert [row[2] for row in (first, *others)] == ["fprop", "dgrad", "wgrad"]
        expected = [
            ("input: bf16", "weight: bf16", "16 x 16", ""),
            ("grad: bf16", "weight: bf16", "16 x 16", ""),
            ("grad: bf16", "input: bf16", "16 x 16", ""),
        ]
        if not edge:
            expected = [
                ("input: nvfp4", "weight: nvfp4-2d", "4.5 x 4.5", ""),
                ("grad: nvfp4 SR", "weight: nvfp4-2d", "4.5 x 4.5", ""),
                ("grad: nvfp4 SR", "input: nvfp4", "4.5 x 4.5", "RHT-16"),
            ]
        assert [row[3:] for row in (first, *others)] == expected


BITS = {
    "nvfp4": 4.5, "mxfp4": 4.25, "mxfp6-e2m3": 6.25, "mxfp6-e3m2": 6.25, "mxfp8-e4m3": 8.25,
    "mxfp8-e5m2": 8.25, "fp8-1x128-e4m3": 8.25, "fp8-1x128-e5m2": 8.25, "fp8-tensor-e4m3": 8,
    "fp8-tensor-e5m2": 8, "fp8-row-e4m3": 8, "fp8-row-e5m2": 8,
    "fp8-128x128-e4m3": 8 + 32 / 128**2, "fp8-128x128-e5m2": 8 + 32 / 128**2,
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_every_format(format):
    """Its own and its share of the scale: E8M0 or E4M3 for a block's row, FP32 for a tile."""
    change = f"configs.bf16.input.format={format}"
    row = cells(load_recipe("bf16", [change]), show.model_layers(None, 1))[0]
    bits = BITS[format.removesuffix("-2d")]
    assert row[5] == f"{bits:.4g} x 16"
    assert FORMATS[format].bits_per_element == bits


def test_bits_of_other_tiles():
    for block, narrow, square in ((64, 8.5, 8 + 32 / 64**2), (16, 10, 8.125)):
        changes = [f"{role}.block={block}" for role in ("input", "weight", "grad")]
        row = cells(load_recipe("fp8-tile", changes), show.model_layers(None, 1))[0]
        assert row[3] == f"input: fp8-1x128-e4m3 pow2 block {block}"
        assert row[4] == f"weight: fp8-128x128-e4m3 pow2 block {block}"
        assert row[5] == f"{narrow:.4g} x {square:.4g}"


def test_everything_that_both_operands_share():
    recipe = load_recipe(
        "fp8-delayed",
        ["dgrad.hadamard={size: 64, signs: fresh}", "wgrad.accumulation={inner: fp8}"],
    )
    rows = cells(recipe, show.model_layers(None, 1))
    shared = [row[6] for row in rows[:3]]
    assert shared[0] == "delayed max-16"
    assert shared[1] == "RHT-64 signs fresh, delayed max-16"
    assert shared[2] == "delayed max-16, fp8 sums of 128"


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_a_hybrid_and_means(flag, capsys):
    """mxfp4 keeps 2 of 4 blocks: the mean is (2 x 4.25 + 2 x 16) / 4 = 10.125."""
    lines = shown("show", "mxfp4", flag, "M-M*", capsys=capsys)
    text = "\n".join(" ".join(line) for line in lines)
    assert "recipe mxfp4: 4 of 8 linear layers quantized" in text
    assert "mean bits an element: fprop 10.1, dgrad 10.1, wgrad 10.1" in text
    layers = [line[1] for line in lines if len(line) > 1 and line[1].startswith("decoder")]
    assert layers == [layer.path for layer in show.model_layers("M-M*", 1)]


@pytest.mark.parametrize(
    ("name", "high"), [("hybrid-12b", "20 of 124"), ("hybrid-8b", "16 of 104")]
)
def test_a_model_that_says_which_blocks_stay_in_bf16(name, high, capsys):
    """The paper's counts of linear layers in BF16 (section 4.1 and appendix A)."""
    file = str(Path(__file__).parents[2] / "examples" / f"{name}.args")
    kept, whole = map(int, high.split(" of "))
    for recipe in ("nvfp4", "mxfp8"):
        title = " ".join(shown("show", recipe, "--model", file, capsys=capsys)[0])
        assert f"{whole - kept} of {whole} linear layers quantized" in title


def test_a_hybrid_from_a_preset(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = shown("show", "nvfp4", "--model", "examples/hybrid-tiny.args", capsys=capsys)
    layers = [line[1] for line in lines if len(line) > 1 and line[1].startswith("decoder")]
    assert layers == [layer.path for layer in show.model_layers("M-M*-M-M-M-M-", 1)]


def test_combined_with_overrides(capsys):
    lines = shown(
        "show", "mxfp4-backward", "--forward", "fp8-tile", "--num-layers", "2",
        "--recipe-set", "backward.wgrad.hadamard.size=32", "--recipe-set", "forward.weight=null",
        capsys=capsys,
    )  # fmt: skip
    rows = [line[3:8] for line in lines if len(line) > 3 and line[3] in ("fprop", "dgrad", "wgrad")]
    overrides = ["backward.wgrad.hadamard.size=32", "forward.weight=null"]
    recipe = load_combined("fp8-tile", "mxfp4-backward", overrides)
    assert rows == [list(row[2:7]) for row in cells(recipe, show.model_layers(None, 2))]
    assert rows[0] == ["fprop", "input: fp8-1x128-e4m3 pow2", "weight: bf16", "8.25 x 16", ""]
    assert rows[2][4] == "RHT-32 fp32 signs fresh"


def test_switches_are_shown(capsys):
    switch = "switches.late={fraction: 0.8, to: bf16, part: forward}"
    lines = shown("show", "nvfp4", "--recipe-set", switch, capsys=capsys)
    text = "\n".join(" ".join(line) for line in lines)
    assert "switch late: from fraction 0.8 on, forward by bf16" in text


def test_where_mxnorm_is_active(capsys):
    """In attention and MLPs that are quantized: nvfp4 keeps 1 + 2 of 12 layers."""
    lines = shown("show", "nvfp4", "--normalization", "MXNorm", capsys=capsys)
    marked = [line for line in lines if line[-2:-1] == ["MXNorm"] or "MXNorm" in " ".join(line)]
    assert len(marked) == 2 * 9
    assert all("fprop" in line for line in marked)
    assert "MXNorm" not in str(shown("show", "nvfp4", capsys=capsys))


def test_list(capsys):
    lines = shown("list", capsys=capsys)
    found = {line[1]: line[2] for line in lines if len(line) > 2}
    assert found.pop("recipe") == "description"
    assert found == {name: load_recipe(name).description for name in shipped_recipes()}


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
        (["show", "nvfp4", "--hybrid-layer-pattern", "ME"], ["'E'", "M, *, -"]),
        (["show", "nvfp4", "--recipe-set", "grad.x=1"], ["configs.nvfp4.grad.x"]),
        (["show", "nvfp4", "--recipe-set", "bf16_blocks.numbers=[40]"], ["block 40", "0 to 11"]),
        (["show", "nvfp4", "--forward", "mxfp8", "--recipe-set", "grad=null"], ["forward.grad"]),
        (["show", "bf16", "--normalization", "MXNorm"], ["MXNorm", "bf16 quantizes none"]),
        (["show", "fp8-delayed", "--normalization", "MXNorm"], ["linear_qkv: ", "mxfp8-e4m3"]),
        (
            [
                "show",
                "nvfp4",
                "--normalization",
                "MXNorm",
                "--recipe-set",
                "configs.bf16.accumulation.inner=bf16",
            ],
            ["layers.0.", "is not quantized"],
        ),
        (
            [
                "show",
                "mxfp8",
                "--normalization",
                "MXNorm",
                "--recipe-set",
                "switches.late={fraction: 0.8, to: bf16, part: forward}",
            ],
            ["(switch late: from fraction 0.8 on, forward by bf16): ", "mxfp8-e4m3"],
        ),
    ],
)
def test_bad_input(arguments, parts):
    with pytest.raises(UserError) as caught:
        main(arguments)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_exit_codes():
    """As a command: 2 and one line on stderr, nothing on stdout; 0 and whole names in a pipe."""
    command = [sys.executable, "-m", "megatron_lowbit.recipes", "show", "mxfp4-backward"]
    bad = subprocess.run([*command, "--num-layers", "two"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1
    narrow = os.environ | {"COLUMNS": "40"}
    good = subprocess.run([*command], capture_output=True, text=True, env=narrow)
    assert good.returncode == 0 and good.stderr == ""
    assert "decoder.layers.11.self_attention.linear_proj" in good.stdout
    assert "weight: mxfp4 three_quarters SR" in good.stdout
