"""Operands of the backward pass that are quantized from fprop's values, in BF16."""

import one_layer
import pytest
import torch
from recording_engine import RecordingEngine

from megatron_lowbit.errors import UserError
from megatron_lowbit.layers import WeightCache
from megatron_lowbit.numerics import Draw, Hadamard, Quantizer, Rounding, format_by_name
from megatron_lowbit.numerics.randomness import operand_key, sign_key
from megatron_lowbit.recipes import (
    GemmPrecision,
    Layer,
    LinearPrecision,
    Progress,
    combine,
    load_combined,
    load_recipe,
)
from tests.numerics.conftest import assert_same
from tests.recipes.conftest import refused

KEY = 2**63 + 5
FORWARD = Quantizer(format_by_name("quartet2"))
BACKWARD = Quantizer(format_by_name("ms-eden"), Rounding.STOCHASTIC)
ROTATION = Hadamard(128, "fresh")
QUARTET2 = LinearPrecision(
    GemmPrecision(FORWARD, FORWARD),
    *[GemmPrecision(BACKWARD, BACKWARD, ROTATION, requantizes_rhs=True)] * 2,
)
FIXED = LinearPrecision(
    GemmPrecision(FORWARD, FORWARD), *[GemmPrecision(FORWARD, FORWARD, requantizes_rhs=True)] * 2
)


def leaves():
    return one_layer.leaves(40, 136, 160)


def run(precision, *tensors, **options):
    engine = RecordingEngine()
    return one_layer.run(*tensors, precision, engine=engine, key=KEY, **options), engine


def values(operand):
    return operand.dequantize().double()


@pytest.mark.parametrize("precision", [QUARTET2, FIXED], ids=["quartet2", "fixed"])
def test_operands(precision):
    """Every operand of the three GEMMs, bit for bit, from the quantizers and documented keys."""
    x, weight, dy = leaves()
    results, engine = run(precision, x, weight, dy)
    forward = {role: FORWARD(t.detach()) for role, t in (("input", x), ("weight", weight))}
    again = {role: q.dequantize().bfloat16().t() for role, q in forward.items()}
    sources = {
        ("dgrad", "grad"): dy, ("dgrad", "weight"): again["weight"],
        ("wgrad", "grad"): dy.t(), ("wgrad", "input"): again["input"],
    }  # fmt: skip
    expected = [(forward["input"], forward["weight"])]
    for gemm, right in (("dgrad", "weight"), ("wgrad", "input")):
        options = {"hadamard": precision.gemms[gemm].hadamard, "sign_key": sign_key(KEY, gemm)}
        expected.append(
            tuple(
                precision.quantizer(gemm, role)(
                    sources[gemm, role], draw=Draw(operand_key(KEY, gemm, role)), **options
                )
                for role in ("grad", right)
            )
        )
    assert len(engine.multiplied) == 3
    for result, seen, wanted in zip(results, engine.multiplied, expected, strict=True):
        for mine, other in zip(seen, wanted, strict=True):
            assert_same(mine, other)
        product = values(seen[0]) @ values(seen[1]).t()
        torch.testing.assert_close(result.double(), product, rtol=1e-5, atol=1e-4)


def test_the_source_plays_no_part():
    """Backward quantizes another weight than the source's transpose: other bits without it."""
    x, weight, dy = leaves()
    own = LinearPrecision(FIXED.fprop, *[GemmPrecision(FORWARD, FORWARD)] * 2)
    (y, *grads), _ = run(FIXED, x, weight, dy)
    (other, *others), _ = run(own, x, weight, dy)
    assert torch.equal(y, other)
    assert not any(map(torch.equal, grads, others))


def test_a_cached_weight_gives_the_same_bits():
    x, weight, dy = leaves()
    expected, _ = run(FIXED, x, weight, dy)
    cache = WeightCache()
    for _ in range(2):
        found, _ = run(FIXED, x, weight, dy, weight_cache=cache)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert cache.operands is not None


SET = ["weight.format=nvfp4", "weight.requantize=true", "input.requantize=true"]


def test_in_a_recipe():
    """Fprop takes no notice; both backward GEMMs have it, in whichever order keys are set."""
    precision = load_recipe("nvfp4", SET).configs["nvfp4"]
    assert [gemm.requantizes_rhs for gemm in precision.gemms.values()] == [False, True, True]
    assert "right requantized" in str(precision.wgrad) and not precision.weight_serves_dgrad
    only = load_recipe("nvfp4", ["wgrad.input.requantize=true"]).configs["nvfp4"]
    assert [gemm.requantizes_rhs for gemm in only.gemms.values()] == [False, False, True]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("grad.requantize=true", ["configs.nvfp4.grad.requantize", "input and weight"]),
        ("input={format: nvfp4, axis: fprop, requantize: true}", ["wgrad", "requantize"]),
        ("wgrad={input: {requantize: true}, fallback: bf16}", ["wgrad", "requantize keeps no"]),
        ("fprop={input: null, weight: null}", ["dgrad.weight", "requantize takes fprop's"]),
        ("fprop.hadamard={size: 16}", ["dgrad.weight", "without a hadamard"]),
        ("weight.requantize=1.5", ["weight.requantize", "valid boolean"]),
    ],
)
def test_refused(override, parts):
    refused(load_recipe, "nvfp4", [*SET, override], parts=parts)


def test_it_has_a_forward_of_its_own():
    with pytest.raises(UserError, match="requantize"):
        load_combined("mxfp8", "nvfp4", [f"backward.{override}" for override in SET])


def test_after_a_forward_pass_in_high_precision_it_quantizes_the_tensors_themselves():
    late = "switches.late={iteration: 5, to: bf16, part: forward}"
    switched = load_recipe("nvfp4", [*SET, late]).at(Progress(5))
    plain = load_recipe("nvfp4", ["weight.format=nvfp4", "fprop=null"])
    layer = Layer("decoder.layers.15.mlp.linear_fc1", 15, 30)
    assert switched.precision_for(layer) == plain.precision_for(layer)


def test_no_other_quantized_forward_follows_one_in_high_precision():
    late = "switches.late={iteration: 5, to: bf16, part: forward}"
    later = "switches.later={iteration: 9, to: mxfp8, part: forward}"
    with pytest.raises(UserError, match="requantize"):
        load_recipe("nvfp4", [*SET, late, later]).at(Progress(9))
    with pytest.raises(UserError, match="requantize"):
        combine(load_recipe("mxfp8"), load_recipe("nvfp4", [*SET, late]).at(Progress(5)))
