"""Recipes from YAML: what the shipped ones say, single fields set, and what wrong ones raise."""

import copy
from fractions import Fraction
from importlib.resources import files

import pytest
import yaml

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import FORMATS, Hadamard, Quantizer, Rounding
from megatron_lowbit.recipes import (
    HIGH_PRECISION,
    GemmPrecision,
    LinearPrecision,
    load_recipe,
    shipped_recipes,
)
from megatron_lowbit.recipes.matchers import BlocksMatcher, GlobMatcher, RegexMatcher

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


def assert_one_line(caught, *parts):
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_shipped_names():
    assert {"bf16", "nvfp4"} <= set(shipped_recipes())
    for name in shipped_recipes():
        assert load_recipe(name).name == name and load_recipe(name).description


def test_nvfp4_builds():
    """Section 4 of the NVFP4 paper: 2D weights, SR on gradients, RHT-16 on wgrad, 2 + 8 of 62."""
    recipe = load_recipe("nvfp4")
    gradient = Quantizer(ROWS, STOCHASTIC)
    weight, activation = Quantizer(SQUARE, NEAREST), Quantizer(ROWS, NEAREST)
    assert recipe.configs == {
        "nvfp4": LinearPrecision(
            fprop=GemmPrecision(activation, weight, tensor_scale="shard"),
            dgrad=GemmPrecision(gradient, weight, tensor_scale="shard"),
            wgrad=GemmPrecision(
                gradient, activation, Hadamard(16, "fixed", "bf16"), tensor_scale="shard"
            ),
        ),
        "bf16": HIGH_PRECISION,
    }
    assert list(recipe.matchers.items()) == [
        ("bf16_blocks", ends(Fraction(2, 62), Fraction(8, 62))),
        ("linears", GlobMatcher(config="nvfp4", enabled=True, pattern="*")),
    ]


def test_bf16_says():
    recipe = load_recipe("bf16")
    assert recipe.configs == {"bf16": HIGH_PRECISION}
    assert [m.config for m in recipe.matchers.values()] == ["bf16"]


def test_file_by_path(tmp_path):
    for suffix in ("yaml", "yml"):
        path = tmp_path / f"mine.{suffix}"
        path.write_text(yaml.safe_dump(SHIPPED, sort_keys=False))
        assert load_recipe(str(path)) == load_recipe("nvfp4")


def test_order_of_matchers_is_the_files(tmp_path):
    def turn(raw):
        raw["matchers"] = dict(reversed(raw["matchers"].items()))

    recipe = load_edited(tmp_path, turn)
    assert list(recipe.matchers) == ["linears", "bf16_blocks"]


def test_disabled_matchers_and_regex(tmp_path):
    def edit(raw):
        raw["matchers"]["bf16_blocks"]["enabled"] = False
        raw["matchers"]["linears"] |= {"type": "regex", "pattern": "fc[12]$"}

    linears = RegexMatcher(config="nvfp4", enabled=True, pattern="fc[12]$")
    assert load_edited(tmp_path, edit).matchers == {"linears": linears}


def test_a_gemm_overrides_its_roles(tmp_path):
    """Field by field; null takes the role, or the whole GEMM, back to high precision."""

    def edit(raw):
        raw["configs"]["nvfp4"] |= {
            "fprop": {"weight": None},
            "dgrad": {"grad": {"rounding": "nearest"}, "weight": {"format": "nvfp4"}},
            "wgrad": None,
        }

    precision = load_edited(tmp_path, edit).configs["nvfp4"]
    assert precision.fprop == GemmPrecision(Quantizer(ROWS, NEAREST), None)
    assert precision.dgrad == GemmPrecision(Quantizer(ROWS, NEAREST), Quantizer(ROWS, NEAREST))
    assert precision.wgrad == GemmPrecision()


# --recipe-set


def test_set_grad_rounding():
    precision = nvfp4("grad.rounding=nearest")
    assert precision.dgrad.lhs == precision.wgrad.lhs == Quantizer(ROWS, NEAREST)
    assert precision.fprop == nvfp4().fprop and precision.wgrad.hadamard == Hadamard(16)


@pytest.mark.parametrize("value", ["null", "none"])
def test_set_no_hadamard(value):
    precision = nvfp4(f"wgrad.hadamard={value}")
    assert precision.wgrad == GemmPrecision(Quantizer(ROWS, STOCHASTIC), Quantizer(ROWS, NEAREST))


def test_set_hadamard_fields():
    assert nvfp4("wgrad.hadamard.size=64").wgrad.hadamard == Hadamard(64, "fixed", "bf16")
    assert nvfp4("dgrad.hadamard={output: fp32}").dgrad.hadamard == Hadamard(output="fp32")


def test_set_weight_format():
    precision = nvfp4("weight.format=nvfp4")
    assert precision.fprop.rhs == precision.dgrad.rhs == Quantizer(ROWS, NEAREST)


def test_set_a_gemm_to_high_precision():
    assert nvfp4("fprop=none").fprop == GemmPrecision()
    assert nvfp4("fprop=none").dgrad == nvfp4().dgrad


def test_set_tensor_scale():
    assert {gemm.tensor_scale for gemm in nvfp4().gemms.values()} == {"shard"}
    changed = nvfp4("tensor_scale=group")
    assert {gemm.tensor_scale for gemm in changed.gemms.values()} == {"group"}
    assert list(changed.operands()) == list(nvfp4().operands())


def test_set_blocks():
    assert list(load_recipe("nvfp4", ["bf16_blocks=none"]).matchers) == ["linears"]
    changed = load_recipe("nvfp4", ["bf16_blocks.last=4"]).matchers["bf16_blocks"]
    assert changed == ends(Fraction(2, 62), 4)
    fractions = ["bf16_blocks.first=1/3", "bf16_blocks.last=0.25"]
    changed = load_recipe("nvfp4", fractions).matchers["bf16_blocks"]
    assert changed == ends(Fraction(1, 3), Fraction(1, 4))


def test_set_leaves_configs_that_do_not_quantize():
    assert load_recipe("nvfp4", ["grad.rounding=nearest"]).configs["bf16"] == HIGH_PRECISION


def test_set_exact_paths():
    recipe = load_recipe(
        "nvfp4", ["configs.bf16.input.format=nvfp4", 'matchers.linears.pattern="*fc1"']
    )
    assert recipe.configs["bf16"].fprop.lhs == Quantizer(ROWS, NEAREST)
    assert recipe.configs["nvfp4"] == nvfp4()
    assert recipe.matchers["linears"].pattern == "*fc1"


def test_set_several_the_last_wins():
    precision = nvfp4("grad.rounding=nearest", "tensor_scale=group", "grad.rounding=stochastic")
    assert precision == nvfp4("tensor_scale=group")
    assert precision.dgrad.lhs == Quantizer(ROWS, STOCHASTIC)


def test_setting_changes_no_later_load():
    load_recipe("nvfp4", ["grad.rounding=nearest", "bf16_blocks=none"])
    assert nvfp4().dgrad.lhs == Quantizer(ROWS, STOCHASTIC)
    assert len(load_recipe("nvfp4").matchers) == 2


@pytest.mark.parametrize(
    "override, parts",
    [
        ("grad.rounding", ["--recipe-set grad.rounding", "FIELD=VALUE"]),
        ("=nearest", ["FIELD=VALUE"]),
        ("", ["FIELD=VALUE"]),
        ("grd.rounding=nearest", ["'grd'", "grad"]),
        ("xyz=1", ["'xyz'", "grad", "fprop", "tensor_scale", "bf16_blocks", "matchers"]),
        ("grad.rnding=nearest", ["configs.nvfp4.grad.rnding", "format, rounding"]),
        ("grad.rounding=up", ["configs.nvfp4.grad.rounding", "'nearest' or 'stochastic'"]),
        ("grad.rounding=[", ["'['", "not a YAML value"]),
        ("grad.format=nvfp8", ["configs.nvfp4.grad.format", "nvfp8", "nvfp4"]),
        ("grad=nearest", ["configs.nvfp4.grad"]),
        ("weight.axis=rows", ["configs.nvfp4.weight.axis", "'own', 'fprop' or 'dgrad'"]),
        ("grad.axis=fprop", ["configs.nvfp4.grad.axis", "input and weight"]),
        ("input.axis=fprop", ["configs.nvfp4.wgrad.input", "axis fprop", "hadamard"]),
        ("dgrad.weight={axis: fprop, rounding: stochastic}", ["nvfp4.dgrad.weight", "rounding"]),
        ("grad=none", ["configs.nvfp4.wgrad", "hadamard transform needs both"]),
        ("tensor_scale=world", ["tensor_scale", "'shard' or 'group'"]),
        ("tensor_scale.x=1", ["tensor_scale has no fields"]),
        (
            "wgrad.hadamard.size=24",
            ["configs.nvfp4.wgrad.hadamard", "24", "power of two from 2 to 256"],
        ),
        ("bf16_blocks.lst=4", ["matchers.bf16_blocks.lst", "first, last"]),
        ("bf16_blocks.last=-4", ["matchers.bf16_blocks.last", "-4", "2/62"]),
        ("bf16_blocks.last=1.5", ["matchers.bf16_blocks.last", "1.5", "2/62"]),
        ("bf16_blocks.config=fp8", ["matchers.bf16_blocks.config", "'fp8'", "nvfp4, bf16"]),
        ("bf16_blocks=3", ["matchers.bf16_blocks"]),
    ],
)
def test_wrong_overrides(override, parts):
    with pytest.raises(UserError) as caught:
        load_recipe("nvfp4", [override])
    assert_one_line(caught, *parts)


@pytest.mark.parametrize(
    "overrides",
    [
        ["configs=none", "grad.rounding=nearest"],
        ["matchers=none", "bf16_blocks=none"],
        ["configs.nvfp4=5", "grad.rounding=nearest"],
    ],
)
def test_an_override_that_breaks_what_the_next_one_sets(overrides):
    with pytest.raises(UserError) as caught:
        load_recipe("nvfp4", overrides)
    assert_one_line(caught, overrides[0].split("=")[0])


# Wrong files


def put(path, value):
    """Return an edit that sets one entry."""

    def edit(raw):
        *parents, last = path.split(".")
        for key in parents:
            raw = raw[key]
        raw[last] = value

    return edit


def drop(path):
    def edit(raw):
        *parents, last = path.split(".")
        for key in parents:
            raw = raw[key]
        del raw[last]

    return edit


WRONG = [
    # unknown keys: the key, and the keys there are
    (put("matcher", {}), ["matcher", "name, description, configs, matchers"]),
    (put("configs.nvfp4.inputs", {}), ["configs.nvfp4.inputs", "input, weight, grad, fprop"]),
    (put("configs.nvfp4.grad.round", "x"), ["configs.nvfp4.grad.round", "format, rounding"]),
    (put("configs.nvfp4.wgrad.rht", 16), ["configs.nvfp4.wgrad.rht", "hadamard"]),
    (
        put("configs.nvfp4.wgrad.hadamard.seed", 1),
        ["configs.nvfp4.wgrad.hadamard.seed", "size, signs, output"],
    ),
    (
        put("configs.nvfp4.fprop", {"input": {"bits": 4}}),
        ["configs.nvfp4.fprop.input.bits", "format, rounding"],
    ),
    (put("matchers.linears.first", 1), ["matchers.linears.first", "pattern"]),
    (put("matchers.bf16_blocks.pattern", "*"), ["matchers.bf16_blocks.pattern", "first, last"]),
    # missing ones
    (drop("name"), ["name", "required"]),
    (drop("configs"), ["configs", "required"]),
    (drop("matchers"), ["matchers", "required"]),
    (drop("matchers.linears.config"), ["matchers.linears.config", "required"]),
    (drop("matchers.linears.enabled"), ["matchers.linears.enabled", "required"]),
    (drop("matchers.linears.pattern"), ["matchers.linears.pattern", "required"]),
    (drop("matchers.linears.type"), ["matchers.linears", "type"]),
    # wrong values: the key, and the good ones
    (
        put("configs.nvfp4.grad.format", "nvfp5"),
        ["configs.nvfp4.grad.format", "mean nvfp4, nvfp4-"],
    ),
    (put("configs.nvfp4.grad.format", "zzz"), ["configs.nvfp4.grad.format", "there are fp8-1x128"]),
    (put("configs.nvfp4.grad.format", 4), ["configs.nvfp4.grad.format", "4"]),
    (put("configs.nvfp4.grad.format", ["nvfp4"]), ["configs.nvfp4.grad.format"]),
    (
        put("configs.nvfp4.grad.rounding", "up"),
        ["configs.nvfp4.grad.rounding", "'nearest' or 'stochastic'"],
    ),
    (put("configs.nvfp4.tensor_scale", 1), ["configs.nvfp4.tensor_scale", "'shard' or 'group'"]),
    (
        put("configs.nvfp4.wgrad.hadamard.signs", "drawn"),
        ["configs.nvfp4.wgrad.hadamard.signs", "'fixed', 'fresh', 'none'", "integer"],
    ),
    (
        put("configs.nvfp4.wgrad.hadamard.output", "fp16"),
        ["configs.nvfp4.wgrad.hadamard.output", "'bf16' or 'fp32'"],
    ),
    (
        put("configs.nvfp4.wgrad.hadamard.size", 17),
        ["configs.nvfp4.wgrad.hadamard", "17", "power of two"],
    ),
    (put("configs.nvfp4.wgrad.hadamard.size", "x"), ["configs.nvfp4.wgrad.hadamard.size"]),
    (put("configs.nvfp4", 5), ["configs.nvfp4"]),
    (put("configs.nvfp4.input", None), ["configs.nvfp4.wgrad", "both operands"]),
    (put("configs", []), ["configs"]),
    (put("matchers", None), ["matchers"]),
    (put("matchers.linears", 3), ["matchers.linears"]),
    (put("matchers.linears.type", "path"), ["matchers.linears", "'blocks', 'glob', 'regex'"]),
    (put("matchers.linears.config", "fp8"), ["matchers.linears.config", "'fp8'", "nvfp4, bf16"]),
    (put("matchers.linears.enabled", "maybe"), ["matchers.linears.enabled"]),
    (put("matchers.bf16_blocks.first", "two"), ["matchers.bf16_blocks.first", "two"]),
    (put("matchers.bf16_blocks.first", "3/2"), ["matchers.bf16_blocks.first", "3/2", "2/62"]),
    (put("matchers.bf16_blocks.first", "1/0"), ["matchers.bf16_blocks.first", "1/0"]),
    (put("matchers.bf16_blocks.first", True), ["matchers.bf16_blocks.first", "2/62"]),
    (put("matchers.bf16_blocks.first", 0.0), ["matchers.bf16_blocks.first", "2/62"]),
    (
        put("matchers.linears", {"type": "regex", "pattern": "(", "config": "nvfp4", "enabled": 1}),
        ["matchers.linears.pattern", "("],
    ),
]


@pytest.mark.parametrize(
    "edit, parts", WRONG, ids=[f"{p[0]}-{i}" for i, (_, p) in enumerate(WRONG)]
)
def test_wrong_entries(tmp_path, edit, parts):
    with pytest.raises(UserError) as caught:
        load_edited(tmp_path, edit)
    assert_one_line(caught, "mine.yaml: ", *parts)


@pytest.mark.parametrize("overrides", [(), ("grad.rounding=nearest",)])
@pytest.mark.parametrize("text", ["", "- 1", "5", "configs: 3\nmatchers: {}", "name: [x"])
def test_files_that_are_no_recipe(tmp_path, text, overrides):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(str(path), overrides)
    assert_one_line(caught, "mine.yaml")


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(UserError) as caught:
        load_recipe(str(path))
    assert_one_line(caught, "mine.yaml")


def test_unknown_names():
    with pytest.raises(UserError) as caught:
        load_recipe("nvfp")
    assert_one_line(caught, "'nvfp'", "did you mean nvfp4", ".yaml")
    with pytest.raises(UserError) as caught:
        load_recipe("zzz")
    assert_one_line(caught, "'zzz'", *shipped_recipes())
    with pytest.raises(UserError) as caught:
        load_recipe("no/such/file.yaml")
    assert_one_line(caught, "no/such/file.yaml", "does not exist")
