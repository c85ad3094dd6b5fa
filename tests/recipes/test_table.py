"""The table printed at start."""

from rich.console import Console

from megatron_lowbit.recipes import Layer, load_recipe, precision_table

NAMES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def model(blocks):
    return [
        Layer(f"decoder.layers.{b}.x.{name}", b, blocks) for b in range(blocks) for name in NAMES
    ]


def rows(recipe, layers):
    table = precision_table(recipe, layers)
    return table.title, list(zip(*(column.cells for column in table.columns), strict=True))


def test_shipped_nvfp4():
    title, cells = rows(load_recipe("nvfp4"), model(8))
    assert title == "recipe nvfp4: 24 of 32 linear layers quantized"
    every = ", ".join(NAMES)
    high = ("bf16_blocks", "bf16", "bf16", "bf16")
    low = (
        "linears",
        "nvfp4 x nvfp4-2d",
        "nvfp4 SR x nvfp4-2d",
        "nvfp4 SR x nvfp4, RHT-16",
    )
    assert cells == [("0", every, *high), ("1-6", every, *low), ("7", every, *high)]


def test_matchers_within_a_block_are_rows_of_their_own(tmp_path):
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
    title, cells = rows(load_recipe(str(path)), model(4))
    assert title == "recipe mine: 6 of 16 linear layers quantized"
    rest = "linear_qkv, linear_proj, linear_fc2"
    low = ("nvfp4 x nvfp4", "bf16 x nvfp4", "bf16 x nvfp4")
    assert sorted(cells) == sorted(
        [
            ("0-3", "linear_fc1", "fc1", "bf16", "bf16", "bf16"),
            ("0", rest, "-", "bf16", "bf16", "bf16"),
            ("1-2", rest, "middle", low[0], low[1], "bf16 x nvfp4"),
            ("3", rest, "-", "bf16", "bf16", "bf16"),
        ]
    )


def test_blocks_of_a_hybrid_go_together():
    parts = {"M": ("in_proj", "out_proj"), "-": ("linear_fc1", "linear_fc2")}
    layers = [
        Layer(f"decoder.layers.{b}.x.{name}", b, 6)
        for b, symbol in enumerate("M-MM-M")
        for name in parts[symbol]
    ]
    _, cells = rows(load_recipe("nvfp4"), layers)
    assert [cell[:3] for cell in cells] == [
        ("0", "in_proj, out_proj", "bf16_blocks"),
        ("1-4", "linear_fc1, linear_fc2, in_proj, out_proj", "linears"),
        ("5", "in_proj, out_proj", "bf16_blocks"),
    ]


def test_it_prints(capsys):
    Console(width=160).print(precision_table(load_recipe("bf16"), model(3)))
    shown = capsys.readouterr().out
    assert "recipe bf16: 0 of 12 linear layers quantized" in shown
    assert "0-2" in shown and "linears" in shown
