"""Keys in the memory of a device: the bits of the same keys as numbers."""

from functools import partial

import pytest
import torch
from one_layer import leaves, precision_of, run

from megatron_lowbit.kernels import launch
from megatron_lowbit.layers import Shards
from megatron_lowbit.numerics import (
    FORMATS,
    Draw,
    Hadamard,
    Quantizer,
    Request,
    Rounding,
    derive_key,
    quantize_both,
)
from megatron_lowbit.numerics.randomness import key_table, operand_key, sign_key
from megatron_lowbit.recipes import OPERANDS
from tests.kernels.test_quantize import DEVICE, check_same, values

KEY = 2**63 + 12345


def table(key=KEY, device="cpu"):
    return torch.tensor(key_table(key), device=device)


def test_the_table_lists_the_same_keys():
    for operand in OPERANDS:
        assert int(operand_key(table(), *operand)) % 2**64 == operand_key(KEY, *operand)
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert int(sign_key(table(), gemm)) % 2**64 == sign_key(KEY, gemm)
    assert len(set(table().tolist())) == 9


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4-backward"])
def test_a_layer_draws_the_same_bits(recipe):
    tensors, keys = leaves(64, 48, 96), (KEY, table(), table(KEY + 1))
    results = [run(*tensors, precision_of(recipe), key=key) for key in keys]
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    assert not torch.equal(results[0][2], results[2][2])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8-tensor-e5m2"])
def test_kernels_read_them(name):
    """Draws and fresh signs, of points and of tiles as one tensor."""
    x = values(24, 200, torch.bfloat16)
    quantizer = Quantizer(FORMATS[name], Rounding.STOCHASTIC)
    keys = [derive_key(KEY, i) for i in range(4)]
    signed = torch.tensor([key - ((key >> 63) << 64) for key in keys], device=DEVICE)

    def requests(keys):
        make = partial(Request, quantizer, Hadamard(16, "fresh"))
        return make(keys[0], Draw(keys[1])), make(keys[2], Draw(keys[3]))

    made = launch.quantize_both(x.to(DEVICE), *requests(signed.unbind()))
    for mine, expected in zip(made, quantize_both(x, *requests(keys)), strict=True):
        check_same(mine, expected)


def test_a_plan_serves_any_keys_and_amaxes():
    """Calls of one shape and kind, which find the same plan, with keys and an amax of their own."""
    x = values(32, 64, torch.bfloat16)
    make = partial(Request, Quantizer(FORMATS["nvfp4"], Rounding.STOCHASTIC), Hadamard(16, "fresh"))
    requests = [make(key, Draw(key + 1)) for key in (5, 7)]
    assert requests[0].keyless is requests[1].keyless is make().keyless
    for request, amax in ((0, None), (1, None), (1, 900.0), (0, None)):
        known = None if amax is None else torch.tensor(amax)
        given = (None if known is None else known.to(DEVICE), None)
        made, _ = launch.quantize_both(x.to(DEVICE), requests[request], None, given)
        check_same(made, quantize_both(x, requests[request], None, (known, None))[0])


def test_token_numbers_are_on_the_layers_device(monkeypatch):
    """Those of the second of two ranks: a graph's capture copies nothing there."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    features = torch.arange(64, device="meta")
    shards = Shards(None, frozenset(), out_features=features, sequence_parallel=True)
    draw = shards.draw(7, "wgrad", "input", 32)
    assert draw.groups.device.type == "meta" and draw.groups.shape == (2,)
