"""Refusals of ``--recipe-set``: one line, with the key and what would be right."""

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import load_recipe

MX_KEYS = "format, rounding, axis, requantize, split_mean, scale_rounding, three_quarters, block"
REFUSED = [
    ("mxfp8", "grad.scale_format=pow2", ["configs.mxfp8.grad.scale_format", "mxfp8-e4m3", MX_KEYS]),
    ("fp8-tile", "grad.three_quarters=true", ["configs.fp8.grad.three_quarters", "scale_format"]),
    ("nvfp4", "weight.scale_rounding=even", ["configs.nvfp4.weight.scale_rounding", "rounding"]),
    ("mxfp4", "dgrad.grad.bits=4", ["configs.mxfp4.dgrad.grad.bits", MX_KEYS]),
    ("mxfp4", "grad.seed=null", ["configs.mxfp4.grad.seed", MX_KEYS]),
    (
        "mxfp8",
        "grad.scale_rounding=up",
        ["configs.mxfp8.grad.scale_rounding", "'up'", "floor, rceil, ceil, even"],
    ),
    ("mxfp4", "wgrad.grad.three_quarters=1", ["wgrad.grad.three_quarters", "false, true"]),
    ("fp8-tile", "input.scale_format=e8m0", ["fp8.input.scale_format", "'e8m0'", "fp32, pow2"]),
    ("fp8-tile", "weight.block=100", ["configs.fp8.weight.block", "100", "128, 64, 32, 16"]),
    ("fp8-tensorwise", "input.block=64", ["configs.fp8.input.block", "scale_format"]),
    ("mxfp8", "input.format=mxfp8-e4m4", ["configs.mxfp8.input.format", "mxfp8-e4m3"]),
    ("nvfp4", "fprop.grad.rounding=nearest", ["configs.nvfp4.fprop.grad", "input, weight"]),
    ("nvfp4", "dgrad.input=null", ["configs.nvfp4.dgrad.input", "grad, weight"]),
    ("nvfp4", "wgrad.weight.format=nvfp4", ["configs.nvfp4.wgrad.weight", "grad, input"]),
    ("nvfp4", "dgrad.rht=16", ["configs.nvfp4.dgrad.rht", "hadamard, accumulation"]),
    ("nvfp4", "wgrad.hadamard.seed=1", ["wgrad.hadamard.seed", "size, signs, output"]),
    ("nvfp4", "wgrad.hadamard.size=512", ["wgrad.hadamard", "512", "from 2 to 256"]),
    ("nvfp4", "wgrad.hadamard.signs=1.5", ["wgrad.hadamard.signs", "1.5", "integer seed"]),
    ("nvfp4", "wgrad.hadamard.signs=true", ["wgrad.hadamard.signs", "'fresh'"]),
    ("mxfp4-backward", "dgrad.weight=null", ["configs.mxfp4.dgrad", "needs both operands"]),
    ("fp8-delayed", "amax_history.len=4", ["amax_history.len", "length, algorithm, just_in_time"]),
    ("fp8-delayed", "amax_history.length=0", ["configs.fp8.amax_history", "length 0"]),
    ("fp8-delayed", "amax_history.just_in_time=0", ["just_in_time 0", "from 1 to 65536"]),
    ("fp8-delayed", "amax_history.algorithm=min", ["amax_history.algorithm", "'max' or 'average'"]),
    ("mxfp8", "accumulation.inner=fp16", ["accumulation.inner", "'fp32', 'bf16' or 'fp8'"]),
    ("mxfp8", "accumulation.every=4", ["configs.mxfp8.accumulation.every", "inner, promote_every"]),
    ("mxfp8", "fallback=fp32", ["configs.mxfp8.fallback", "'bf16'"]),
    ("nvfp4", "dgrad={fallback: bf16, weight: {axis: fprop}}", ["dgrad", "axis fprop keeps no"]),
    ("mxfp8", "dgrad.accumulation.promote_every=0", ["dgrad.accumulation", "0 is not positive"]),
    ("mxfp8", "tensor_scale=world", ["tensor_scale", "'shard' or 'group'"]),
    ("mxfp8", "configs.mxfp8.scale=1", ["configs.mxfp8.scale", "input, weight, grad, fprop"]),
    ("nvfp4", "configs.input={x: 1}", ["configs.input.x", "tensor_scale, amax_history"]),
    ("bf16", "grad.rounding=nearest", ["grad.rounding", "quantizes", "configs.bf16.grad.rounding"]),
    ("bf16", "accumulation.inner=fp8", ["accumulation.inner", "configs.bf16.accumulation.inner"]),
]


@pytest.mark.parametrize("name, override, parts", REFUSED)
def test_refused(name, override, parts):
    with pytest.raises(UserError) as caught:
        load_recipe(name, [override])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
