"""``--recipe-set``: every switch of an ablation on every shipped recipe, every field in reach."""

from dataclasses import fields as dataclass_fields
from dataclasses import replace
from functools import cache

import pytest
import yaml

from megatron_lowbit.numerics import (
    FORMATS,
    Accumulation,
    DelayedScaling,
    Hadamard,
    Quantizer,
    Rounding,
    format_by_name,
)
from megatron_lowbit.numerics.gemms import GEMM_ROLES, OPERANDS
from megatron_lowbit.recipes import (
    HIGH_PRECISION,
    GemmPrecision,
    LinearPrecision,
    load_recipe,
    matchers,
    schema,
    shipped_recipes,
)
from tests.marks import others_slow

# GEMMs whose operands are another's values cannot be changed alone; nemotron3-super has two that
# are quantized.
TIED = (
    "averis", "nvfp4-backward", "quartet2", "tetrajet2", "torchao-v2", "torchao-v2-late-bf16",
)  # fmt: skip
QUANTIZING = [
    name
    for name in shipped_recipes()
    if name not in ("bf16", "nemotron3-super", *TIED) and "qat-" not in name
]
# Of each structure one: two configs, one GEMM in BF16 or with operands of its own, a history.
QUICK = ("nvfp4", "mxfp4-backward", "mxfp8", "fp8-tile", "fp8-delayed")
EACH = others_slow(QUANTIZING, QUICK)
MX = ["mxfp8", "mxfp4", "mxfp4-backward"]
TENSOR_SCALED = ["nvfp4", "fp8-tensorwise", "fp8-delayed"]
FP8 = ["fp8-tile", "fp8-tile-e4m3", "fp8-tensorwise", "fp8-delayed"]
GEMMS_OF = [
    pytest.param(name, gemm, marks=[pytest.mark.slow] * (name not in QUICK))
    for name in QUANTIZING
    for gemm in GEMM_ROLES
    if (name, gemm) != ("mxfp4-backward", "fprop")
]


def test_which_recipes_tie_gemms_together():
    configs = {name: load_recipe(name).configs.values() for name in shipped_recipes()}
    tied = {name for name, found in configs.items() if any(p.shares_operands for p in found)}
    assert {name for name in tied if not name.startswith("qat-")} == set(TIED)


@cache
def low(name, *overrides) -> LinearPrecision:
    """Return the one config of a shipped recipe that quantizes."""
    configs = load_recipe(name, overrides).configs.values()
    (found,) = (config for config in configs if config != HIGH_PRECISION)
    return found


def changed(precision, of, change) -> LinearPrecision:
    """Return the precision with ``change(quantizer)`` for each (GEMM, role) that is quantized."""
    gemms = {}
    for gemm, (left, right) in GEMM_ROLES.items():
        before = precision.gemms[gemm]
        lhs = change(before.lhs) if (gemm, left) in of and before.lhs else before.lhs
        rhs = change(before.rhs) if (gemm, right) in of and before.rhs else before.rhs
        gemms[gemm] = replace(before, lhs=lhs, rhs=rhs)
    return LinearPrecision(**gemms)


def every_gemm(precision, **fields) -> LinearPrecision:
    return LinearPrecision(**{g: replace(p, **fields) for g, p in precision.gemms.items()})


# Transforms


@pytest.mark.parametrize("name, gemm", GEMMS_OF)
def test_a_transform_on_any_gemm(name, gemm):
    """Transforms of every size, each with one kind of signs, on this GEMM alone; and off again."""
    base = low(name)
    for size, signs in zip((32, 64, 128, 256), ("fixed", "fresh", "none", 7), strict=True):
        result = low(name, f"{gemm}.hadamard={{size: {size}, signs: {signs}, output: fp32}}")
        transform = Hadamard(size, signs, "fp32")
        of_gemm = replace(base.gemms[gemm], hadamard=transform)
        assert result == replace(base, **{gemm: of_gemm})
    off = low(name, f"{gemm}.hadamard={{size: 64}}", f"{gemm}.hadamard=null")
    assert off == replace(base, **{gemm: replace(base.gemms[gemm], hadamard=None)})


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp4-backward"])
@pytest.mark.parametrize(
    "field, value, attribute",
    [
        ("size", "128", 128), ("signs", "fixed", "fixed"), ("signs", "fresh", "fresh"),
        ("signs", "none", "none"), ("signs", "null", "none"), ("signs", "-3", -3),
        ("output", "bf16", "bf16"), ("output", "fp32", "fp32"),
    ],
)  # fmt: skip
def test_one_field_of_a_transform(name, field, value, attribute):
    base = low(name)
    transform = replace(base.wgrad.hadamard, **{field: attribute})
    expected = replace(base, wgrad=replace(base.wgrad, hadamard=transform))
    assert low(name, f"wgrad.hadamard.{field}={value}") == expected


# Rounding


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("role", ["input", "weight", "grad"])
def test_rounding_of_a_role_or_of_one_operand(name, role, rounding):
    """Stochastic rounding on and off: for a role in all its GEMMs, or in one."""
    base = low(name)
    every = {operand for operand in OPERANDS if operand[1] == role}

    def rounded(quantizer):
        return replace(quantizer, rounding=rounding)

    result = low(name, f"{role}.rounding={rounding.value}")
    assert result == changed(base, every, rounded)
    for gemm, _ in every - {("fprop", role)}:
        result = low(name, f"{gemm}.{role}.rounding={rounding.value}")
        assert result == changed(base, {(gemm, role)}, rounded)


# Options of formats


@pytest.mark.parametrize(
    "name, option, value",
    [
        *((n, "scale_rounding", v) for n in MX for v in ("floor", "rceil", "ceil", "even")),
        *((n, "three_quarters", v) for n in MX for v in (False, True)),
        *((n, "block", v) for n in ("mxfp8", "mxfp4-backward") for v in (32, 16)),
        *((n, "scale_format", v) for n in FP8 for v in ("fp32", "pow2")),
        *((n, "block", v) for n in ("fp8-tile", "fp8-tile-e4m3") for v in (128, 64, 32, 16)),
    ],
)
@pytest.mark.parametrize("role", ["input", "weight", "grad"])
def test_an_option_of_a_role_or_of_one_operand(name, role, option, value):
    base = low(name)
    every = {operand for operand in OPERANDS if operand[1] == role}

    def with_option(quantizer):
        format = replace(quantizer.format, **{option: value})
        if option == "block" and quantizer.format.block_rows > 1:
            format = replace(format, block_rows=value)
        return replace(quantizer, format=format)

    text = str(value).lower()
    assert low(name, f"{role}.{option}={text}") == changed(base, every, with_option)
    one = low(name, f"dgrad.grad.{option}={text}")
    assert one == changed(base, {("dgrad", "grad")}, with_option)


# Formats and blocks


@pytest.mark.parametrize(
    "name, role, format",
    [
        ("nvfp4", "weight", "nvfp4"), ("nvfp4", "input", "nvfp4-2d"), ("nvfp4", "grad", "nvfp4-2d"),
        ("mxfp4", "weight", "mxfp4"), ("mxfp8", "weight", "mxfp8-e4m3-2d"),
        ("mxfp8", "grad", "mxfp8-e5m2"), ("mxfp8", "input", "mxfp6-e2m3"),
        ("mxfp4-backward", "weight", "mxfp4-2d"), ("fp8-tile", "weight", "fp8-1x128-e4m3"),
        ("fp8-tile", "input", "fp8-128x128-e4m3"), ("fp8-tile-e4m3", "grad", "fp8-1x128-e5m2"),
        ("fp8-tensorwise", "grad", "fp8-tensor-e4m3"), ("fp8-delayed", "weight", "fp8-tensor-e5m2"),
    ],
)  # fmt: skip
def test_block_shapes_and_elements(name, role, format):
    """1D and 2D, E4M3 and E5M2: another format of the family keeps options and rounding."""
    every = {operand for operand in OPERANDS if operand[1] == role}

    def reformatted(quantizer):
        return replace(quantizer, format=format_by_name(format, **quantizer.format.options))

    base = low(name)
    assert low(name, f"{role}.format={format}") == changed(base, every, reformatted) != base


@pytest.mark.parametrize("where", ["grad", "dgrad.grad"])
def test_another_format_keeps_the_options_that_it_has(where):
    """And the rounding: unbiased MXFP4 stays unbiased with other blocks or elements."""
    result = low("mxfp4-backward", f"{where}.format=mxfp4-2d").dgrad.lhs
    assert result == Quantizer(
        replace(FORMATS["mxfp4-2d"], three_quarters=True), Rounding.STOCHASTIC
    )
    result = low("mxfp8", f"{where}.format=nvfp4").dgrad.lhs
    assert result == Quantizer(FORMATS["nvfp4"])
    assert low("fp8-tile", f"{where}.format=null").dgrad.lhs is None
    # The whole role: options and rounding are the new format's own.
    result = low("mxfp4", "grad={format: nvfp4}")
    assert result.dgrad.lhs == result.wgrad.lhs == Quantizer(FORMATS["nvfp4"])
    assert result.fprop == low("mxfp4").fprop


def test_another_format_in_one_gemm():
    """Its role's rounding and the options that both formats have."""
    base = low("mxfp4-backward")
    result = low("mxfp4-backward", "dgrad.grad.format=nvfp4")
    assert result.dgrad.lhs == Quantizer(FORMATS["nvfp4"], Rounding.STOCHASTIC)
    assert result.wgrad == base.wgrad
    result = low("mxfp4-backward", "dgrad.grad={format: mxfp6-e3m2, scale_rounding: even}")
    even = replace(FORMATS["mxfp6-e3m2"], scale_rounding="even", three_quarters=True)
    assert result.dgrad.lhs == Quantizer(even, Rounding.STOCHASTIC)
    assert low("mxfp4-backward", "dgrad.grad.format=mxfp4") == base


# What both operands share


@pytest.mark.parametrize("name", EACH)
def test_tensor_scale(name):
    gemms = low(name).gemms.values()
    scaled = any(side and side.format.tensor_scaled for gemm in gemms for side in gemm.sides)
    for value in ("group", "shard") if scaled else ("shard",):
        expected = {
            gemm: replace(p, tensor_scale=value) if p.quantized else p
            for gemm, p in low(name).gemms.items()
        }
        assert low(name, f"tensor_scale={value}") == LinearPrecision(**expected)


@pytest.mark.parametrize("name", TENSOR_SCALED)
@pytest.mark.parametrize(
    "value, delayed",
    [
        ("{length: 4, algorithm: average, just_in_time: 2}", DelayedScaling(4, "average", 2)),
        ("{}", DelayedScaling(16, "max", None)),
        ("null", None),
    ],
)
def test_amax_history(name, value, delayed):
    result = low(name, f"amax_history={value}")
    assert result == every_gemm(low(name), delayed=delayed)


@pytest.mark.parametrize(
    "field, value", [("just_in_time", 1), ("algorithm", "average"), ("length", 1024)]
)
def test_one_field_of_the_amax_history(field, value):
    base = low("fp8-delayed")
    delayed = replace(base.fprop.delayed, **{field: value})
    result = low("fp8-delayed", f"amax_history.{field}={value}")
    assert result == every_gemm(base, delayed=delayed)


@pytest.mark.parametrize("name", EACH)
def test_fallback(name):
    """For all GEMMs of a config that are quantized, and per GEMM."""
    base = low(name)
    gemms = {g: replace(p, fallback="bf16" if p.quantized else None) for g, p in base.gemms.items()}
    assert low(name, "fallback=bf16") == LinearPrecision(**gemms)
    assert low(name, "fallback=bf16", "dgrad.fallback=null").dgrad == base.dgrad
    assert low(name, "dgrad.fallback=bf16") == replace(base, dgrad=gemms["dgrad"])


@pytest.mark.parametrize("name", EACH)
def test_accumulation(name):
    """For all GEMMs of a config (but for one that is set to null), and per GEMM."""
    base = low(name)
    narrow = Accumulation("fp8", 32)
    gemms = {
        gemm: replace(p, accumulation=narrow) if p.quantized else p
        for gemm, p in base.gemms.items()
    }
    assert low(name, "accumulation={inner: fp8, promote_every: 32}") == LinearPrecision(**gemms)
    own = low(name, "accumulation={inner: fp8}", "wgrad.accumulation={promote_every: null}")
    assert own.wgrad == replace(base.wgrad, accumulation=Accumulation("fp32", None))
    assert own.dgrad == replace(base.dgrad, accumulation=Accumulation("fp8", 128))
    but_one = low(name, "accumulation={inner: fp8}", "dgrad.accumulation=null")
    assert (but_one.dgrad, but_one.wgrad.accumulation.inner) == (base.dgrad, "fp8")
    one = low(name, "dgrad.accumulation.inner=bf16")
    assert one == replace(base, dgrad=replace(base.dgrad, accumulation=Accumulation("bf16", 128)))


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("gemm", GEMM_ROLES)
def test_a_gemm_in_high_precision(name, gemm):
    assert low(name, f"{gemm}=null") == replace(low(name), **{gemm: GemmPrecision()})


@pytest.mark.parametrize("name, gemm", GEMMS_OF)
def test_an_operand_in_high_precision(name, gemm):
    """Its transform must go with it."""
    for side, role in zip(("lhs", "rhs"), GEMM_ROLES[gemm], strict=True):
        result = low(name, f"{gemm}.hadamard=null", f"{gemm}.{role}=null")
        of_gemm = replace(low(name).gemms[gemm], hadamard=None, **{side: None})
        assert result == replace(low(name), **{gemm: of_gemm})


# Every field of the schema

EVERYTHING = {
    "name": "all",
    "configs": {
        "low": {
            "input": {"format": "mxfp8-e4m3"},
            "weight": {"format": "fp8-tensor-e4m3"},
            "grad": {"format": "mxfp8-e5m2"},
            "fprop": {},
            "wgrad": {"hadamard": {}, "accumulation": {}},
            "amax_history": {},
            "accumulation": {},
        },
        "low2": {"input": {"format": "nvfp4"}, "grad": {"format": "nvfp4"}},
    },
    "matchers": {
        "ends": {"type": "blocks", "first": 1, "config": "low", "enabled": True},
        "mlps": {"type": "glob", "pattern": "decoder*", "config": "low", "enabled": True},
        "rest": {"type": "regex", "pattern": "layers", "config": "low", "enabled": True},
        "other": {"type": "glob", "pattern": "*", "config": "low2", "enabled": True},
    },
    "switches": {"late": {"fraction": 0.5, "to": "bf16"}},
}
FIELDS = {  # a class of the schema -> an override for each of its fields
    "RecipeSpec": {
        "name": "name=other", "description": "description=text", "configs": "configs.low2={}",
        "matchers": "matchers.more={type: glob, pattern: x, config: low, enabled: true}",
        "switches": "switches.more={iteration: 5, to: mxfp8}", "output_layer": "output_layer=low",
    },
    "PrecisionSpec": {
        "input": "input.format=nvfp4", "weight": "weight=null", "grad": "grad.format=mxfp4",
        "fprop": "fprop=null", "dgrad": "dgrad={grad: null}", "wgrad": "wgrad=null",
        "tensor_scale": "tensor_scale=group", "amax_history": "amax_history=null",
        "accumulation": "accumulation=null", "fallback": "fallback=bf16",
        "folding": "folding=false",
    },
    "GemmSpec": {
        "input": "fprop.input.format=nvfp4", "weight": "fprop.weight=null",
        "grad": "dgrad.grad.rounding=stochastic", "hadamard": "wgrad.hadamard=null",
        "accumulation": "wgrad.accumulation=null", "fallback": "wgrad.fallback=bf16",
        "folding": "wgrad.folding=false",
        "hot_channels": "configs.low.fprop.hot_channels=0.1",
    },
    "OperandSpec": {
        "format": "input.format=mxfp4", "rounding": "input.rounding=stochastic",
        "axis": "weight.axis=fprop", "requantize": "wgrad.input.requantize=true",
        "split_mean": "fprop.input.split_mean=true",
    },
    "Hadamard": {
        "size": "wgrad.hadamard.size=8", "signs": "wgrad.hadamard.signs=5",
        "output": "wgrad.hadamard.output=fp32",
    },
    "DelayedScaling": {
        "length": "amax_history.length=20", "algorithm": "amax_history.algorithm=average",
        "just_in_time": "amax_history.just_in_time=3",
    },
    "Accumulation": {
        "inner": "accumulation.inner=fp8", "promote_every": "wgrad.accumulation.promote_every=4",
    },
    "BlocksMatcher": {
        "type": "ends={type: glob, pattern: x, config: low, enabled: true}",
        "first": "ends.first=2", "last": "ends.last=1/4", "numbers": "ends.numbers=[3, -2]",
        "kinds": "ends.kinds=[mlp, moe]",
        "config": "ends.config=low2", "enabled": "ends.enabled=false",
    },
    "GlobMatcher": {
        "type": "mlps.type=regex", "pattern": "mlps.pattern=x", "config": "mlps.config=low2",
        "enabled": "mlps.enabled=false",
    },
    "RegexMatcher": {
        "type": "rest.type=glob", "pattern": "rest.pattern=x", "config": "rest.config=low2",
        "enabled": "rest.enabled=false",
    },
    "SwitchSpec": {
        "iteration": "switches.late={iteration: 9, to: bf16}",
        "fraction": "switches.late.fraction=0",
        "tokens": "switches.late={tokens: 1.0e+9, to: bf16}", "to": "switches.late.to=mxfp8",
        "part": "switches.late.part=forward", "enabled": "switches.late.enabled=false",
    },
}  # fmt: skip


def test_the_fields_above_are_all_of_the_schema():
    models = {name: x for module in (schema, matchers) for name, x in vars(module).items()}
    for name, overrides in FIELDS.items():
        kind = models[name]
        fields = getattr(kind, "model_fields", None) or [f.name for f in dataclass_fields(kind)]
        # Formats are named in a file alone; oscillation, which excludes amax_history, has tests of
        # its own.
        assert set(overrides) == set(fields) - {"formats", "oscillation"}, name
    named = [x for x in models if x.endswith(("Spec", "Matcher")) and x[0] != "_"]
    assert set(named) - {"Matcher"} <= set(FIELDS)


@pytest.mark.parametrize(
    "override", [override for fields in FIELDS.values() for override in fields.values()]
)
def test_every_field_can_be_set(tmp_path, override):
    """And changes the recipe that is built."""
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump(EVERYTHING))
    assert load_recipe(str(path), [override]) != load_recipe(str(path))
