"""Tensor and sequence parallelism in two processes against the same layer in one.

The file is its own worker: the test starts it twice, once a rank, over gloo. Each rank runs every
check against the unsharded layer, which it computes too, and reports what went wrong by name.
"""

import dataclasses
import itertools
import json
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_layer import history, precision_of
from recording_engine import RecordingEngine

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import UNSHARDED, LinearContext, Shards, lowbit_linear
from megatron_lowbit.numerics import QuantizedTensor, quantize
from megatron_lowbit.numerics.formats import unpack_nibbles
from megatron_lowbit.recipes import HIGH_PRECISION
from tests import processes

RANKS = 2
KEY = 2**64 - 99
N, K = 64, 128  # pieces of whole blocks: a block that crosses ranks has another scale
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def precision(*overrides, name="nvfp4"):
    return precision_of(name, *overrides)


GROUP = precision("tensor_scale=group")
# Every operand rounds stochastically: all six draws must name the global elements.
ALL_STOCHASTIC = precision(
    "tensor_scale=group", "input.rounding=stochastic", "weight.rounding=stochastic"
)
SQUARE_INPUT = precision("tensor_scale=group", "input.format=nvfp4-2d")
SAME_AXIS = precision(
    *["tensor_scale=group", "weight.format=nvfp4", "wgrad.hadamard=none"],
    *["weight.axis=fprop", "input.axis=fprop"],
)
REQUANTIZED = precision(
    *["tensor_scale=group", "weight.format=nvfp4"],
    *["weight.requantize=true", "input.requantize=true"],
)
MEANS = precision(
    *["tensor_scale=group", "wgrad.hadamard=none", "input.axis=fprop", "grad.axis=dgrad"],
    *["input.split_mean=true", "grad.split_mean=true"],
)
PRECISIONS = {
    "group": GROUP, "stochastic": ALL_STOCHASTIC, "square": SQUARE_INPUT, "same axis": SAME_AXIS,
    "requantized": REQUANTIZED, "means": MEANS,
}  # fmt: skip
FP8 = precision("tensor_scale=group", name="fp8-tensorwise")
FP8_STOCHASTIC = precision(
    "tensor_scale=group",
    *(f"{role}.rounding=stochastic" for role in ("input", "weight", "grad")),
    name="fp8-tensorwise",
)
ROWS = precision(name="fp8-row")
TENSORS_OF_ROWS = precision(
    *["weight={format: nvfp4-ue5m3, tensor_scaled: false}", "wgrad.hadamard=none"],
    *["input.row_scaled=true", "grad.row_scaled=true", "grad.rounding=nearest"],
)
DELAYED = precision("tensor_scale=group", "amax_history.just_in_time=1", name="fp8-delayed")
# Transforms on every GEMM, which fit the pieces of 16 and 32 features.
TRANSFORMED = precision(
    "tensor_scale=group",
    "input.rounding=stochastic",
    "fprop.hadamard={size: 32, signs: fresh}",
    "dgrad.hadamard={size: 16, signs: fresh, output: fp32}",
    "wgrad.hadamard={size: 8, signs: 3}",
)


def run(x, weight, dy, how, shards=UNSHARDED, history=None):
    """Return (y, dX, dW) and the operands of fprop, dgrad, wgrad."""
    x, weight = (t.detach().contiguous().requires_grad_() for t in (x, weight))
    seen = RecordingEngine()
    context = LinearContext(how, seen, KEY, shards=shards, amax_history=history)
    y = lowbit_linear(x, weight, context)
    dx, dw = torch.autograd.grad(y, [x, weight], dy.contiguous())
    return (y.detach(), dx, dw), seen.multiplied


def whole(tokens, *batch):
    """Return x, weight, dY of the unsharded layer; shards differ in amax on every axis."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, *batch, K, generator=generator)
    weight = torch.randn(N, K, generator=generator) / K**0.5
    dy = torch.randn(tokens, *batch, N, generator=generator)
    x[: tokens // 2] *= 3
    x[..., K // 2 :] *= 2
    weight[: N // 4] *= 5
    weight[:, : K // 3] *= 2
    dy[..., : N // 4] *= 4
    return x, weight, dy


def features(total):
    """Return this rank's global features, in two pieces, as a gated first linear has them."""
    piece = total // (2 * RANKS)
    starts = torch.tensor([dist.get_rank(), dist.get_rank() + RANKS]) * piece
    return (starts[:, None] + torch.arange(piece)).flatten()


def close(result, expected, tolerance):
    """Check ``tolerance`` of the largest value: FP32 sums of up to 128 terms in another order."""
    assert result.shape == expected.shape, (result.shape, expected.shape)
    error = (result - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {error:.3g}"


def same(result, expected, rows=slice(None), columns=slice(None)):
    """Compare bit for bit with rows and columns of ``expected``: codes, scales and tensor scale."""
    if isinstance(expected, QuantizedTensor):
        assert result.format == expected.format
        assert torch.equal(result.tensor_scale, expected.tensor_scale), "another tensor scale"
        # A block that is cut has the scale in both parts: the first of each row's.
        block = expected.format.block
        numbers = torch.arange(expected.shape[1])[columns][::block] // block
        if expected.scales.shape[1]:
            same(bytes_of(result.scales), bytes_of(expected.scales), rows, numbers)
        same(codes_of(result), codes_of(expected), rows, columns)
        result, expected = result.dequantize(), expected.dequantize()
    expected = expected[rows][:, columns] if expected.ndim > 1 else expected
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert torch.equal(result, expected), f"{(result != expected).sum()} of {result.numel()} differ"


def bytes_of(tensor):
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def codes_of(quantized):
    four_bits = quantized.format.element.bits == 4
    return unpack_nibbles(quantized.codes) if four_bits else bytes_of(quantized.codes)


def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def column_shards(mine, **options):
    roles = {"weight", "grad"} | ({"input"} if options.get("sequence_parallel") else set())
    return Shards(dist.group.WORLD, frozenset(roles), out_features=mine, **options)


def row_shards(mine):
    return Shards(dist.group.WORLD, frozenset({"weight", "input"}), in_features=mine)


def same_as_columns_of(full, operands, mine):
    """Check that operands of a column-parallel layer are the parts of the whole layer's."""
    (x_, w), (grad, w_t), (grad_t, x_t) = full
    same(operands[0][0], x_)
    same(operands[0][1], w, mine)
    same(operands[1][0], grad, columns=mine)
    same(operands[1][1], w_t, columns=mine)
    same(operands[2][0], grad_t, mine)
    same(operands[2][1], x_t)


def column_parallel(how, tolerance=1e-6):
    x, weight, dy = whole(48)
    mine = features(N)
    (y, dx, dw), full = run(x, weight, dy, how)
    results, operands = run(
        x, weight[mine], dy[:, mine], how, column_shards(mine, allreduce_dgrad=True)
    )
    close(results[0], y[:, mine], tolerance)
    close(results[1], dx, 1e-5)
    close(results[2], dw[mine], tolerance)
    same_as_columns_of(full, operands, mine)
    partial, _ = run(x, weight[mine], dy[:, mine], how, column_shards(mine))
    close(summed(partial[1]), dx, 1e-5)
    same(summed(partial[1]), results[1])


def row_parallel(how, tolerance=1e-6):
    x, weight, dy = whole(48)
    mine = features(K)
    (y, dx, dw), full = run(x, weight, dy, how)
    results, operands = run(x[:, mine], weight[:, mine], dy, how, row_shards(mine))
    close(summed(results[0]), y, 1e-5)
    close(results[1], dx[:, mine], tolerance)
    close(results[2], dw[:, mine], tolerance)
    (x_, w), (grad, w_t), (grad_t, x_t) = full
    same(operands[0][0], x_, columns=mine)
    same(operands[0][1], w, columns=mine)
    same(operands[1][0], grad)
    same(operands[1][1], w_t, mine)
    same(operands[2][0], grad_t)
    same(operands[2][1], x_t, mine)


def sequence_parallel(how, tokens, *batch, tolerance=1e-6):
    x, weight, dy = whole(tokens, *batch)
    mine = features(N)
    local = slice(dist.get_rank() * tokens // RANKS, (dist.get_rank() + 1) * tokens // RANKS)
    (y, dx, dw), full = run(x, weight, dy, how)
    shards = column_shards(mine, sequence_parallel=True)
    results, operands = run(x[local], weight[mine], dy[..., mine], how, shards)
    close(results[0], y[..., mine], tolerance)
    close(results[1], dx[local], 1e-5)
    close(results[2], dw[mine], tolerance)
    same_as_columns_of(full, operands, mine)


@check
def high_precision():
    column_parallel(HIGH_PRECISION, 1e-5)
    row_parallel(HIGH_PRECISION, 1e-5)
    sequence_parallel(HIGH_PRECISION, 48, tolerance=1e-5)
    sequence_parallel(HIGH_PRECISION, 10, 3, tolerance=1e-5)


@check
def columns_and_rows():
    for how in (GROUP, ALL_STOCHASTIC):
        column_parallel(how)
        row_parallel(how)


@check
def sequence_parallel_gathers_codes():
    """Check 32 local tokens: whole blocks, so codes travel."""
    for how in PRECISIONS.values():
        sequence_parallel(how, 64)


@check
def fp8_tensors():
    """Check one scale for the whole tensor, with which codes travel under sequence parallelism."""
    for how, tokens in ((FP8, 64), (FP8_STOCHASTIC, 34)):
        column_parallel(how)
        row_parallel(how)
        sequence_parallel(how, tokens)


@check
def rows():
    """Check that rows of fprop and wgrad are whole on every rank; dgrad's end with a shard."""
    for how, tokens in itertools.product((ROWS, TENSORS_OF_ROWS), (64, 34)):
        x, weight, dy = whole(tokens)
        mine, first = features(N), dist.get_rank() * tokens // RANKS
        shards = column_shards(mine, sequence_parallel=True)
        x_local = x[first : first + tokens // RANKS]
        results, operands = run(x_local, weight[mine], dy[:, mine], how, shards)
        (y, _, dw), _ = run(x, weight, dy, how)
        close(results[0], y[:, mine], 1e-6)
        close(results[2], dw[mine], 1e-6)
        for seen, source, axis in (
            (operands[0][0], x, 1), (operands[0][1], weight[mine], 1),
            (operands[1][0], dy[:, mine], 1), (operands[1][1], weight[mine], 0),
            (operands[2][0], dy[:, mine], 0), (operands[2][1], x, 0),
        ):  # fmt: skip
            wanted = quantize(source, seen.format.name, axis=axis, **seen.format.options)
            assert torch.equal(bytes_of(seen.codes), bytes_of(wanted.codes))
            assert torch.equal(bytes_of(seen.scales), bytes_of(wanted.scales))
            assert torch.equal(seen.tensor_scale, wanted.tensor_scale)


@check
def transforms():
    column_parallel(TRANSFORMED)
    row_parallel(TRANSFORMED)
    for tokens in (64, 34):
        sequence_parallel(TRANSFORMED, tokens)


@check
def delayed_scaling_of_the_group():
    """Check that ranks record the whole tensor's amaxes, and scale by them in the next step."""
    x, weight, dy = whole(48)
    mine = features(N)
    alone, ours = (history() for _ in range(2))
    for scale in (1.0, 0.5):
        _, full = run(scale * x, weight, dy, DELAYED, history=alone)
        shards = column_shards(mine, allreduce_dgrad=True)
        _, operands = run(scale * x, weight[mine], dy[:, mine], DELAYED, shards, history=ours)
        assert (alone.step >= 0).sum() == 5  # dgrad's weight is fprop's
        same(ours.step, alone.step)
        same(operands[0][0], full[0][0])
        same(operands[0][1], full[0][1], mine)
        same(operands[1][0], full[1][0], columns=mine)
        same(operands[2][0], full[2][0], mine)
        same(operands[2][1], full[2][1])
        for each in (alone, ours):
            each.advance(each.step)
    assert torch.equal(full[0][0].tensor_scale, quantize(x, "fp8-tensor-e4m3").tensor_scale)


@check
def sequence_parallel_with_a_batch_axis():
    sequence_parallel(ALL_STOCHASTIC, 16, 4)


@check
def sequence_parallel_ragged():
    """Check 24 and 17 local tokens: wgrad's blocks cross ranks, so its input is gathered."""
    sequence_parallel(GROUP, 48)
    for how in PRECISIONS.values():
        sequence_parallel(how, 34)


@check
def sequence_parallel_input_amax_is_the_groups_anyway():
    """Check tensor_scale=shard: gathered codes have one tensor scale."""
    x, weight, dy = whole(64)
    mine = features(N)
    local = slice(dist.get_rank() * 32, dist.get_rank() * 32 + 32)
    shards = column_shards(mine, sequence_parallel=True)
    _, operands = run(x[local], weight[mine], dy[:, mine], precision(), shards)
    same(operands[0][0], quantize(x, "nvfp4"))
    same(operands[2][1], quantize(x, "nvfp4", axis=0, hadamard=16))


@check
def tensor_scale_of_the_shard():
    """Check tensor_scale=shard: operands are scaled by the rank's own amax, not the group's."""
    x, weight, dy = whole(48)
    column, row = features(N), features(K)
    split = [
        (
            column_shards(column),
            (x, weight[column], dy[:, column]),
            [(0, 1), (1, 0), (1, 1), (2, 0)],
        ),
        (row_shards(row), (x[:, row], weight[:, row], dy), [(0, 0), (0, 1), (1, 1), (2, 1)]),
    ]
    for name in ("nvfp4", "fp8-tensorwise"):
        how = precision("grad.rounding=nearest", name=name)
        _, full = run(x, weight, dy, how)
        for shards, tensors, sharded in split:
            _, alone = run(*tensors, how)
            _, operands = run(*tensors, how, shards)
            for gemm, side in sharded:
                same(operands[gemm][side], alone[gemm][side])
                differs = operands[gemm][side].tensor_scale != full[gemm][side].tensor_scale
                assert summed(differs.float()) >= 1, (name, gemm, side)


@check
def sequence_parallel_saves_local_codes():
    """Check that half a byte an element of this rank's tokens is saved, not of all."""
    x, weight, _ = whole(256)
    mine = features(N)
    local = x[dist.get_rank() * 128 :][:128].contiguous().requires_grad_()
    part = weight[mine].requires_grad_()
    sizes = []

    def pack(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lowbit_linear(
            local,
            part,
            LinearContext(
                GROUP,
                ReferenceEngine("tests"),
                KEY,
                shards=column_shards(mine, sequence_parallel=True),
            ),
        )
    assert sum(sizes) <= 0.6 * (local.numel() + part.numel()), sizes


@check
def other_numbers_give_other_bits():
    """Check that the checks above can fail: numbers counted from zero draw other bits."""
    x, weight, dy = whole(48)
    mine = features(N)
    _, full = run(x, weight, dy, GROUP)
    shards = dataclasses.replace(column_shards(mine, allreduce_dgrad=True), out_features=None)
    _, operands = run(x, weight[mine], dy[:, mine], GROUP, shards)
    assert not torch.equal(operands[2][0].codes, full[2][0].codes[mine])


def work(rank, store, out):
    """Run every check of one rank in order; write its traceback or null by name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    report = {}
    for name, function in CHECKS.items():
        dist.barrier()
        try:
            function()
            report[name] = None
        except Exception:
            report[name] = traceback.format_exc()
        Path(out).write_text(json.dumps(report))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(start_script, tmp_path_factory):
    """Reports of each rank; a check that a rank never came to is missing there."""
    folder = tmp_path_factory.mktemp("ranks")
    outputs = [folder / f"{rank}.txt" for rank in range(RANKS)]
    workers = [
        start_script(__file__, rank, folder / "store", folder / f"{rank}.json", output=output)
        for rank, output in enumerate(outputs)
    ]
    processes.finish(workers, timeout=60)
    errors = [output.read_text() for output in outputs]
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    return [
        json.loads(file.read_text()) if file.exists() else {"stderr": error}
        for file, error in zip(files, errors, strict=True)
    ]


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(reports, name):
    for rank, report in enumerate(reports):
        assert name in report, f"rank {rank} did not come to it: {report.get('stderr')}"
        assert report[name] is None, f"rank {rank}: {report[name]}"


if __name__ == "__main__":
    work(int(sys.argv[1]), *sys.argv[2:])
