"""Recipes from YAML: shipped ones, single fields set, and one-line errors for wrong ones."""

import copy
from fractions import Fraction
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import FORMATS, Quantizer, Rounding
from megatron_lowbit.recipes import (
    HIGH_PRECISION,
    Layer,
    LinearPrecision,
    load_recipe,
    shipped_recipes,
)
from megatron_lowbit.recipes.matchers import BlocksMatcher
from megatron_lowbit.study.sensitivity import keep_in_high_precision, most_sensitive
from tests.recipes.conftest import refused

ROOT = Path(__file__).parents[2]

ROWS, SQUARE = FORMATS["nvfp4"], FORMATS["nvfp4-2d"]
NEAREST, STOCHASTIC = Rounding.NEAREST_EVEN, Rounding.STOCHASTIC
SHIPPED = yaml.safe_load(
    (files("megatron_lowbit.recipes") / "shipped" / "nvfp4.yaml").read_text("utf-8")
)


def ends(first, last) -> BlocksMatcher:
    return BlocksMatcher(config="bf16", enabled=True, first=first, last=last)


def nvfp4(*overrides) -> LinearPrecision:
    return load_recipe("nvfp4", overrides).configs["nvfp4"]


def load_edited(tmp_path, edit, overrides=()):
    """Return the shipped nvfp4 recipe, changed by ``edit``, read back from a file."""
    raw = copy.deepcopy(SHIPPED)
    edit(raw)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return load_recipe(str(path), overrides)


def test_shipped_names():
    assert {"bf16", "nvfp4"} <= set(shipped_recipes())
    for name in shipped_recipes():
        assert load_recipe(name).name == name and load_recipe(name).description


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_file_loads_by_its_name_and_by_its_path(path):
    """The file of several recipes is the first of them."""
    assert load_recipe(path.stem) == load_recipe(path)
    assert load_recipe(path).name == ("qat-nvfp4" if path.stem == "qat" else path.stem)


@pytest.mark.parametrize("text", ["", "[]", "nvfp4", "{}", "nvfp4: 3", "qat-nvfp4: []"])
def test_a_file_of_ones_own_may_be_named_as_that_of_several(tmp_path, text):
    file = tmp_path / "qat.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"^qat\.yaml: "):
        load_recipe(file)
    file.write_text((ROOT / "recipes" / "mxfp8.yaml").read_text())
    assert load_recipe(file) == load_recipe("mxfp8")


def test_file_by_path(tmp_path):
    for suffix in ("yaml", "yml"):
        path = tmp_path / f"mine.{suffix}"
        path.write_text(yaml.safe_dump(SHIPPED, sort_keys=False))
        assert load_recipe(str(path)) == load_recipe("nvfp4")


# --recipe-set


def test_set_blocks():
    assert list(load_recipe("nvfp4", ["bf16_blocks=none"]).matchers) == ["linears"]
    changed = load_recipe("nvfp4", ["bf16_blocks.last=4"]).matchers["bf16_blocks"]
    assert changed == ends(Fraction(2, 62), 4)
    fractions = ["bf16_blocks.first=1/3", "bf16_blocks.last=0.25"]
    changed = load_recipe("nvfp4", fractions).matchers["bf16_blocks"]
    assert changed == ends(Fraction(1, 3), Fraction(1, 4))


def test_set_exact_paths():
    recipe = load_recipe(
        "nvfp4", ["configs.bf16.input.format=nvfp4", 'matchers.linears.pattern="*fc1"']
    )
    assert recipe.configs["bf16"].fprop.lhs == Quantizer(ROWS, NEAREST)
    assert recipe.configs["nvfp4"] == nvfp4()
    assert recipe.matchers["linears"].pattern == "*fc1"
    # Without a path, in configs that quantize.
    assert load_recipe("nvfp4", ["grad.rounding=nearest"]).configs["bf16"] == HIGH_PRECISION


def test_set_several_the_last_wins():
    precision = nvfp4("grad.rounding=nearest", "tensor_scale=group", "grad.rounding=stochastic")
    assert precision == nvfp4("tensor_scale=group")
    assert precision.dgrad.lhs == Quantizer(ROWS, STOCHASTIC)


def test_setting_changes_no_later_load():
    load_recipe("nvfp4", ["grad.rounding=nearest", "bf16_blocks=none"])
    assert nvfp4().dgrad.lhs == Quantizer(ROWS, STOCHASTIC)
    assert len(load_recipe("nvfp4").matchers) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["configs=none", "grad.rounding=nearest"],
        ["matchers=none", "bf16_blocks=none"],
        ["configs.nvfp4=5", "grad.rounding=nearest"],
    ],
)
def test_an_override_that_breaks_what_the_next_one_sets(overrides):
    refused(load_recipe, "nvfp4", overrides, parts=[overrides[0].split("=")[0]])


# Refusals: the key, and what would be right

MX_KEYS = "format, rounding, axis, requantize, split_mean, scale_rounding, three_quarters, block"
SIGNS = "'fixed', 'fresh', 'none' or an integer seed"
REFUSED = [
    # no field, or no value
    ("nvfp4", "grad.rounding", ["--recipe-set grad.rounding", "FIELD=VALUE"]),
    ("nvfp4", "=nearest", ["FIELD=VALUE"]),
    ("nvfp4", "", ["FIELD=VALUE"]),
    ("nvfp4", "grd.rounding=nearest", ["'grd'", "grad"]),
    ("nvfp4", "xyz=1", ["'xyz'", "grad", "fprop", "tensor_scale", "bf16_blocks", "matchers"]),
    ("nvfp4", "grad.rounding=[", ["'['", "not a YAML value"]),
    ("nvfp4", "grad=nearest", ["configs.nvfp4.grad"]),
    ("nvfp4", "tensor_scale.x=1", ["tensor_scale has no fields"]),
    ("bf16", "grad.rounding=nearest", ["grad.rounding", "quantizes", "configs.bf16.grad.rounding"]),
    ("bf16", "accumulation.inner=fp8", ["accumulation.inner", "configs.bf16.accumulation.inner"]),
    # unknown keys
    ("nvfp4", "configs.nvfp4.inputs={}", ["configs.nvfp4.inputs", "input, weight, grad, fprop"]),
    ("nvfp4", "configs.input={x: 1}", ["configs.input.x", "tensor_scale, amax_history"]),
    ("nvfp4", "grad.rnding=nearest", ["configs.nvfp4.grad.rnding", "format, rounding"]),
    ("nvfp4", "fprop={input: {bits: 4}}", ["configs.nvfp4.fprop.input.bits", "format, rounding"]),
    ("nvfp4", "dgrad.rht=16", ["configs.nvfp4.dgrad.rht", "hadamard, accumulation"]),
    ("nvfp4", "wgrad.hadamard.seed=1", ["wgrad.hadamard.seed", "size, signs, output"]),
    ("mxfp8", "grad.scale_format=pow2", ["configs.mxfp8.grad.scale_format", "mxfp8-e4m3", MX_KEYS]),
    ("fp8-tile", "grad.three_quarters=true", ["configs.fp8.grad.three_quarters", "scale_format"]),
    ("nvfp4", "weight.scale_rounding=even", ["configs.nvfp4.weight.scale_rounding", "rounding"]),
    ("mxfp4", "dgrad.grad.bits=4", ["configs.mxfp4.dgrad.grad.bits", MX_KEYS]),
    ("mxfp4", "grad.seed=null", ["configs.mxfp4.grad.seed", MX_KEYS]),
    ("fp8-tensorwise", "input.block=64", ["configs.fp8.input.block", "scale_format"]),
    ("fp8-delayed", "amax_history.len=4", ["amax_history.len", "length, algorithm, just_in_time"]),
    ("mxfp8", "accumulation.every=4", ["configs.mxfp8.accumulation.every", "inner, promote_every"]),
    ("nvfp4", "matchers.linears.first=1", ["matchers.linears.first", "pattern"]),
    ("nvfp4", "bf16_blocks.lst=4", ["matchers.bf16_blocks.lst", "first, last"]),
    # operands that a GEMM does not have, and combinations
    ("nvfp4", "fprop.grad.rounding=nearest", ["configs.nvfp4.fprop.grad", "input, weight"]),
    ("nvfp4", "dgrad.input=null", ["configs.nvfp4.dgrad.input", "grad, weight"]),
    ("nvfp4", "wgrad.weight.format=nvfp4", ["configs.nvfp4.wgrad.weight", "grad, input"]),
    ("nvfp4", "grad.axis=fprop", ["configs.nvfp4.grad.axis", "input and weight"]),
    ("nvfp4", "input.axis=fprop", ["configs.nvfp4.wgrad.input", "axis fprop", "hadamard"]),
    ("nvfp4", "dgrad.weight={axis: fprop, rounding: stochastic}", ["dgrad.weight", "rounding"]),
    ("nvfp4", "dgrad={fallback: bf16, weight: {axis: fprop}}", ["dgrad", "axis fprop keeps no"]),
    ("nvfp4", "grad=none", ["configs.nvfp4.wgrad", "hadamard transform needs both"]),
    ("nvfp4", "input=none", ["configs.nvfp4.wgrad", "hadamard transform needs both"]),
    ("mxfp4-backward", "dgrad.weight=null", ["configs.mxfp4.dgrad", "needs both operands"]),
    # values
    ("nvfp4", "grad.format=4", ["configs.nvfp4.grad.format", "4"]),
    ("nvfp4", "grad.format=[nvfp4]", ["configs.nvfp4.grad.format"]),
    ("mxfp8", "input.format=mxfp8-e4m4", ["configs.mxfp8.input.format", "mxfp8-e4m3"]),
    ("nvfp4", "grad.rounding=up", ["configs.nvfp4.grad.rounding", "'nearest' or 'stochastic'"]),
    ("nvfp4", "weight.axis=rows", ["configs.nvfp4.weight.axis", "'own', 'fprop' or 'dgrad'"]),
    ("mxfp8", "grad.scale_rounding=up", ["mxfp8.grad.scale_rounding", "'up'", "floor, rceil"]),
    ("mxfp4", "wgrad.grad.three_quarters=1", ["wgrad.grad.three_quarters", "false, true"]),
    ("fp8-tile", "input.scale_format=e8m0", ["fp8.input.scale_format", "'e8m0'", "fp32, pow2"]),
    ("fp8-tile", "weight.block=100", ["configs.fp8.weight.block", "100", "128, 64, 32, 16"]),
    ("nvfp4", "wgrad.hadamard.size=24", ["nvfp4.wgrad.hadamard", "24", "from 2 to 256"]),
    ("nvfp4", "wgrad.hadamard.size=512", ["wgrad.hadamard", "512", "from 2 to 256"]),
    ("nvfp4", "wgrad.hadamard.size=x", ["configs.nvfp4.wgrad.hadamard.size"]),
    ("nvfp4", "wgrad.hadamard.signs=drawn", ["configs.nvfp4.wgrad.hadamard.signs", SIGNS]),
    ("nvfp4", "wgrad.hadamard.signs=1.5", ["wgrad.hadamard.signs", "1.5", SIGNS]),
    ("nvfp4", "wgrad.hadamard.signs=true", ["wgrad.hadamard.signs", SIGNS]),
    ("nvfp4", "wgrad.hadamard.output=fp16", ["nvfp4.wgrad.hadamard.output", "'bf16' or 'fp32'"]),
    ("fp8-delayed", "amax_history.length=0", ["configs.fp8.amax_history", "length 0"]),
    ("fp8-delayed", "amax_history.just_in_time=0", ["just_in_time 0", "from 1 to 65536"]),
    ("fp8-delayed", "amax_history.algorithm=min", ["amax_history.algorithm", "'max' or 'average'"]),
    ("mxfp8", "accumulation.inner=fp16", ["accumulation.inner", "'fp32', 'bf16' or 'fp8'"]),
    ("mxfp8", "dgrad.accumulation.promote_every=0", ["dgrad.accumulation", "0 is not positive"]),
    ("mxfp8", "fallback=fp32", ["configs.mxfp8.fallback", "'bf16'"]),
    ("mxfp8", "tensor_scale=world", ["configs.mxfp8.tensor_scale", "'shard' or 'group'"]),
    ("nvfp4", "configs.nvfp4=5", ["configs.nvfp4"]),
    ("nvfp4", "configs=[]", ["configs"]),
    ("nvfp4", "matchers=null", ["matchers"]),
    ("nvfp4", "matchers.linears=3", ["matchers.linears"]),
    ("nvfp4", "linears.type=path", ["matchers.linears", "'blocks', 'glob', 'regex'"]),
    ("nvfp4", "bf16_blocks.config=fp8", ["matchers.bf16_blocks.config", "'fp8'", "nvfp4, bf16"]),
    ("nvfp4", "linears.enabled=maybe", ["matchers.linears.enabled"]),
    ("nvfp4", "linears={type: regex, pattern: (, config: nvfp4, enabled: 1}",
     ["matchers.linears.pattern", "("]),
    # numbers and text as booleans that change a method
    ("quartet2", "dgrad.weight.requantize=1", ["requantize", "valid boolean"]),
    ("averis", "fprop.input.split_mean='on'", ["split_mean", "valid boolean"]),
    # booleans as numbers
    ("nvfp4", "fprop.hot_channels=true", ["configs.nvfp4.fprop.hot_channels", "not True"]),
    ("nvfp4", "wgrad.hadamard.size=true", ["wgrad.hadamard.size", "a number, not True"]),
    ("fp8-delayed", "amax_history={length: true}", ["amax_history.length", "a number, not True"]),
    ("fp8-delayed", "amax_history.just_in_time=true", ["just_in_time", "a number, not True"]),
    ("mxfp8", "fprop.accumulation={promote_every: true}", ["promote_every", "not True"]),
    ("mxfp8", "oscillation={start: true, period: 9}", ["oscillation.start", "not True"]),
    ("mxfp8", "oscillation={start: 5, period: true}", ["oscillation.period", "not True"]),
    ("nvfp4", "switches.s={iteration: true, to: bf16}", ["s.iteration", "a number, not True"]),
    ("nvfp4", "switches.s={tokens: true, to: bf16}", ["s.tokens", "a number, not True"]),
    ("nvfp4", "switches.s={fraction: false, to: bf16}", ["s.fraction", "a number, not False"]),
    ("nvfp4", "bf16_blocks.numbers=[true]", ["bf16_blocks.numbers.0", "a number, not True"]),
    *(("nvfp4", f"bf16_blocks.first={value}", ["matchers.bf16_blocks.first", shown, "2/62"])
      for value, shown in (("two", "two"), ("3/2", "3/2"), ("1/0", "1/0"), ("true", "true"),
                           ("0.0", "0.0"), ("1.5", "1.5"), ("-4", "-4"))),
]  # fmt: skip


def test_numbers_that_yaml_reads_as_text():
    assert nvfp4("fprop.hot_channels=1e-1").fprop.hot_channels == 0.1
    assert load_recipe("nvfp4", ["switches.s={tokens: 1e9, to: bf16}"]).switches[0].at == 1e9
    recipe = load_recipe("mxfp8", ["oscillation={start: 1e-1, period: 100}"])
    assert recipe.oscillation.start == 0.1


@pytest.mark.parametrize("name, override, parts", REFUSED)
def test_refused(name, override, parts):
    refused(load_recipe, name, [override], parts=parts)


@pytest.mark.parametrize(
    "path",
    ["name", "configs", "matchers", *(f"matchers.linears.{key}" for key in
     ("config", "enabled", "pattern", "type"))],
)  # fmt: skip
def test_missing_entries(tmp_path, path):
    def drop(raw):
        *parents, last = path.split(".")
        for key in parents:
            raw = raw[key]
        del raw[last]

    problem = "missing" if "type" in path else "required"
    refused(load_edited, tmp_path, drop, parts=[f"mine.yaml: {path}", problem])


def test_an_unknown_key_of_a_file(tmp_path):
    parts = ["mine.yaml: matcher: no such key", "name, description, configs"]
    refused(load_edited, tmp_path, lambda raw: raw.update(matcher={}), parts=parts)


@pytest.mark.parametrize("overrides", [(), ("grad.rounding=nearest",)])
@pytest.mark.parametrize(
    "content", [b"", b"- 1", b"5", b"configs: 3\nmatchers: {}", b"name: [x", b"name: \xff\xfe"]
)
def test_files_that_are_no_recipe(tmp_path, content, overrides):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    refused(load_recipe, str(path), overrides, parts=["mine.yaml"])


def test_unknown_names():
    refused(load_recipe, "nvfp", parts=["'nvfp'", "did you mean nvfp4", ".yaml"])
    refused(load_recipe, "zzz", parts=["'zzz'", "lowbit-recipes list"])
    refused(load_recipe, "no/such/file.yaml", parts=["no/such/file.yaml", "does not exist"])


# Layers by sensitivity


def test_the_most_sensitive_within_the_budget():
    scores = {"a": 3.0, "b": 5.0, "c": 4.0, "d": 1.0}
    sizes = {"a": 10, "b": 20, "c": 50, "d": 20}
    assert most_sensitive(scores, sizes, 0.30) == ["b", "a"]  # c does not fit beside b
    assert most_sensitive(scores, sizes, 0.19) == ["a"]
    assert most_sensitive(scores, sizes, 0.0) == []
    assert most_sensitive(scores, sizes, 1.0) == ["b", "c", "a", "d"]


NAMED_AS_THESE = """
name: before
configs:
  high: {input: {format: mxfp8-e4m3}, weight: {format: mxfp8-e4m3}}
matchers:
  sensitive: {type: glob, pattern: "*", config: high, enabled: true}
"""


@pytest.mark.parametrize("text", [None, NAMED_AS_THESE])
@pytest.mark.parametrize(
    "paths",
    [["decoder.layers.1.mlp.linear_fc1", "decoder.layers.11.self_attention.linear_qkv"], []],
)
def test_layers_that_are_kept(tmp_path, paths, text):
    """Only those; what the recipe kept by position is quantized like all others."""
    before, file = "nvfp4", tmp_path / "after.yaml"
    if text is not None:
        before = str(tmp_path / "before.yaml")
        Path(before).write_text(text)
    file.write_text(yaml.safe_dump(keep_in_high_precision(before, paths), sort_keys=False))
    recipe, usual = load_recipe(file), load_recipe(before, ["bf16_blocks=none"] * (text is None))
    for number in range(24):
        for name in ("mlp.linear_fc1", "self_attention.linear_qkv"):
            layer = Layer(f"decoder.layers.{number}.{name}", number, 24)
            wanted = HIGH_PRECISION if layer.path in paths else usual.precision_for(layer)
            assert recipe.precision_for(layer) == wanted
