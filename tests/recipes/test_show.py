"""``python -m megatron_lowbit.recipes``: tables of what a recipe does to a model, and exits."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import load_recipe, shipped_recipes, show
from megatron_lowbit.recipes.command import main

GPT = ["attention", "attention", "mlp", "mlp"]
FIRST = ["fprop", "input", "bf16", "16"]
NAMES = {
    "attention": ["self_attention.linear_qkv", "self_attention.linear_proj"],
    "mlp": ["mlp.linear_fc1", "mlp.linear_fc2"],
    "mamba": ["mixer.in_proj", "mixer.out_proj"],
}


def shown(*arguments, capsys):
    """Return the cells of each line that a command prints into a pipe."""
    main(arguments)
    return [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]


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
    with pytest.raises(UserError) as caught:
        show.model_layers(pattern, number)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("pattern", ["M*/", "M|*", "M*//"])
def test_borders_that_are_no_blocks(pattern):
    assert show.model_layers(pattern, 1) == show.model_layers("M*", 1)


# Tables


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_a_hybrid_and_means(flag, capsys):
    """mxfp4 keeps 2 of 4 blocks: the mean is (2 x 4.25 + 2 x 16) / 4 = 10.125."""
    lines = shown("show", "mxfp4", flag, "M-M*", capsys=capsys)
    assert lines[0] == ["recipe mxfp4: 4 of 8 linear layers quantized"]
    assert lines[1] == ["blocks", "linear layers", "matcher", "GEMM", "operand", "format", "bits"]
    assert lines[-1] == ["mean bits an element: fprop 10.1, dgrad 10.1, wgrad 10.1"]
    assert ["0", "mixer.in_proj, mixer.out_proj", "bf16_blocks", *FIRST] in lines
    assert [
        "1",
        "mlp.linear_fc1, mlp.linear_fc2",
        "linears",
        *FIRST[:2],
        "mxfp4 rceil",
        "4.25",
    ] in lines


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
    pattern = "M-M*-M-M-M-M-"
    assert shown("show", "nvfp4", "--model", "examples/hybrid-tiny.args", capsys=capsys) == shown(
        "show", "nvfp4", "--hybrid-layer-pattern", pattern, capsys=capsys
    )


def test_combined_with_overrides(capsys):
    lines = shown(
        "show", "mxfp4-backward", "--forward", "fp8-tile", "--num-layers", "2",
        "--recipe-set", "backward.wgrad.hadamard.size=32", "--recipe-set", "forward.weight=null",
        capsys=capsys,
    )  # fmt: skip
    rows = [line[3:] for line in lines if len(line) > 3]
    assert rows[1:3] == [
        ["fprop", "input", "fp8-1x128-e4m3 pow2", "8.25"],
        ["fprop", "weight", *FIRST[2:]],
    ]
    assert ["wgrad", "both", "RHT-32 fp32 signs fresh"] in rows
    assert {line[2] for line in lines if len(line) > 3} == {"matcher", "linears / linears"}


def test_switches_are_shown(capsys):
    switch = "switches.late={fraction: 0.8, to: bf16, part: forward}"
    lines = shown("show", "nvfp4", "--recipe-set", switch, capsys=capsys)
    assert lines[-1] == ["switch late: from fraction 0.8 on, forward by bf16"]


def test_where_mxnorm_is_active(capsys):
    """In attention and MLPs that are quantized: nvfp4 keeps 1 + 2 of 12 blocks."""
    lines = shown("show", "nvfp4", "--normalization", "MXNorm", capsys=capsys)
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
    lines = shown("list", capsys=capsys)
    found = dict(lines)
    assert found.pop("recipe") == "description"
    assert found == {name: load_recipe(name).description for name in shipped_recipes()}


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
        (["show", "nvfp4", "--hybrid-layer-pattern", "MG"], ["'G'", "M, *, +, -, E"]),
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
