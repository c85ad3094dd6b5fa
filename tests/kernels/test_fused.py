"""The engine of GPUs against the reference: which route, and products to a stated bound."""

from dataclasses import replace

import pytest
import torch

from megatron_lowbit.kernels import cublas, routes
from megatron_lowbit.kernels import gemm as gemms
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.kernels.gemm import plain
from megatron_lowbit.kernels.operands import ExactBF16, Transposed
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.numerics import FORMATS, AmaxHistory, Quantizer, Request, gemm
from megatron_lowbit.recipes import OPERANDS, Layer, load_recipe, shipped_recipes

HOPPER = (9, 0)
PAIRS = {
    ("fp8-1x128-e4m3", "fp8-128x128-e4m3"): "FP8 tiles",
    ("fp8-1x128-e5m2", "fp8-1x128-e4m3"): "FP8 tiles",
    ("fp8-tensor-e5m2", "fp8-tensor-e4m3"): "FP8 tensors",
    ("fp8-row-e4m3", "fp8-row-e4m3"): "FP8 rows",
    ("fp8-row-e5m2", "fp8-row-e4m3"): "FP8 rows",
    ("fp8-row-e5m2", "fp8-row-e5m2"): "dequantized to FP32",
    ("fp8-row-e4m3", "fp8-tensor-e4m3"): "dequantized to FP32",
    ("mxfp4", "mxfp4"): "folded to FP8 tensors",
    ("nvfp4", "nvfp4-2d"): "exact BF16",
    ("mxfp8-e4m3", "mxfp8-e5m2"): "folded to FP8 tensors",
    ("mxfp4", "mxfp8-e4m3"): "folded to FP8 tensors",
    ("mxfp8-e4m3", "fp8-tensor-e4m3"): "folded to FP8 tensors",
    ("mxfp8-e5m2", "mxfp8-e5m2"): "exact BF16",
    ("mxfp6-e2m3", "nvfp4"): "exact BF16",
    ("mxfp6-e2m3", None): "exact BF16",
    ("fp8-1x128-e4m3", None): "dequantized to FP32",
    ("fp8-1x128-e5m2", "fp8-1x128-e5m2"): "dequantized to FP32",
    ("fp8-128x128-e4m3", "fp8-128x128-e4m3"): "dequantized to FP32",
    ("fp8 1x64", "fp8-128x128-e4m3"): "dequantized to FP32",
    ("fp8 1x64 pow2", "fp8 64x64 pow2"): "folded to FP8 tensors",
    ("fp8 1x128 pow2", "fp8 1x128 pow2"): "folded to FP8 tensors",
    ("fp8 1x128 pow2", "fp8 128x128 pow2"): "FP8 tiles",
    ("fp8 1x128 e5m2 pow2", "fp8 128x128 pow2"): "folded to FP8 tensors",
    ("fp8 64x64 pow2", "fp8-1x128-e4m3"): "dequantized to FP32",
    ("fp8 1x64 pow2", None): "exact BF16",
    ("nvfp4 foldable-up", "nvfp4-2d foldable"): "folded to FP8 tensors",
    ("nvfp4 foldable-up", "mxfp8-e4m3"): "folded to FP8 tensors",
    ("nvfp4 foldable-up", "nvfp4"): "exact BF16",
    ("nvfp4-ue5m3", "nvfp4-ue5m3-2d"): "exact BF16",
    ("ms-eden", "quartet2"): "exact BF16",
    ("tetrajet2", "tetrajet2"): "BF16 blocks",
    ("tetrajet2", None): "dequantized to FP32",
    ("nvfp4 rows", "nvfp4-2d"): "exact BF16",
    ("nvfp4 rows", "nvfp4 rows"): "exact BF16",
}
TILES = {
    "fp8 1x64": ("fp8-1x128-e4m3", "fp32", 64),
    "fp8 1x64 pow2": ("fp8-1x128-e5m2", "pow2", 64),
    "fp8 64x64 pow2": ("fp8-128x128-e4m3", "pow2", 64),
    "fp8 1x128 pow2": ("fp8-1x128-e4m3", "pow2", 128),
    "fp8 1x128 e5m2 pow2": ("fp8-1x128-e5m2", "pow2", 128),
    "fp8 128x128 pow2": ("fp8-128x128-e4m3", "pow2", 128),
}
ALL = FORMATS | {
    name: FORMATS[of].with_options(block=block, scale_format=scale)
    for name, (of, scale, block) in TILES.items()
}
ALL |= {
    f"{name} {scales}": FORMATS[name].with_options(block_scales=scales)
    for name, scales in (("nvfp4", "foldable-up"), ("nvfp4-2d", "foldable"))
}
ALL["nvfp4 rows"] = FORMATS["nvfp4"].with_options(row_scaled=True)
# Errors of the sum, as shares of the sum of magnitudes, before rounding to the output. Hopper's FP8
# tensor cores cut each step of 32 products off at 2**-13 of the largest; tiles are promoted to FP32
# after 4 steps, the others never. FP32 sums: another order.
STEP, PRODUCTS = 2.0**-13, 32
BOUNDS = {
    "FP8 tiles": lambda length: 4 * STEP,
    "FP8 tensors": lambda length: -(-length // PRODUCTS) * STEP,
    "FP8 rows": lambda length: -(-length // PRODUCTS) * STEP,
    "folded to FP8 tensors": lambda length: -(-length // PRODUCTS) * STEP,
    "exact BF16": lambda length: 1e-5,
    "BF16 blocks": lambda length: 1e-5,
    "dequantized to FP32": lambda length: 1e-5,
}


def names(pair):
    return [None if name is None else ALL[name] for name in pair]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_routes(pair):
    engine = FusedEngine(HOPPER)
    assert engine.route(*names(pair)).name == PAIRS[pair]
    assert engine.route(*reversed(names(pair))).name == PAIRS[pair]


@pytest.mark.parametrize(
    "pair", [("fp8-1x128-e4m3", "fp8-128x128-e4m3"), ("fp8-row-e4m3", "fp8-row-e4m3")], ids=str
)
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_tiles_and_rows_have_tensor_cores_on_hopper_only(pair, capability):
    assert FusedEngine(capability).route(*names(pair)).name == "dequantized to FP32"


@pytest.mark.parametrize("shape", [(40, 24, 200), (130, 136, 256)], ids=str)
def test_blocks_of_two_scales_are_multiplied(shape):
    """Rows have other magnitudes, and the scales of 128 are no numbers of BF16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(3)
    rows, columns, terms = shape
    pair = []
    for height in (rows, columns):
        x = torch.randn(height, terms, generator=generator) * torch.arange(1.0, height + 1)[:, None]
        pair.append(Quantizer(FORMATS["tetrajet2"])(x.to(device)))
    left, right = (operand.dequantize().double() for operand in pair)
    engine, before = FusedEngine(HOPPER), torch.randn(rows, columns, device=device)
    bound = 1e-5 * (left.abs() @ right.abs().t() + before.abs())
    expected = left @ right.t()
    product = engine.gemm(*pair, out_dtype=torch.float32)
    assert ((product - expected).abs() <= bound).all()
    total = before.clone()
    engine.gemm(*pair, into=(total, True))
    assert ((total - before - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("pair", "route"),
    [(("mxfp8-e4m3", "mxfp8-e5m2"), "exact BF16"), (("mxfp4", "mxfp4"), "exact BF16"),
     (("fp8 1x128 pow2", "fp8 1x128 pow2"), "FP8 tiles")],
)  # fmt: skip
def test_routes_without_folding(pair, route):
    assert FusedEngine(HOPPER).route(*names(pair), folding=False).name == route


def test_bf16_beside_values_in_fp32():
    """A BF16 gradient and the values that an FP8 or FP4 tensor of fprop stands for."""
    lhs = (torch.arange(256).view(8, 32) % 7 - 3).bfloat16()
    rhs = torch.arange(128.0).view(4, 32) % 11 + 2.0**-12  # not numbers of BF16; all sums are exact
    result = FusedEngine(HOPPER).gemm(lhs, rhs, out_dtype=torch.float32)
    assert torch.equal(result.double(), lhs.double() @ rhs.double().t())


def test_a_shared_weight_takes_the_route_of_each_of_its_gemms():
    engine = FusedEngine(HOPPER)
    weight = Transposed(Quantizer(FORMATS["nvfp4-2d"])(torch.ones(32, 32)))
    for name, route in (("nvfp4", "exact BF16"), ("fp8-1x128-e4m3", "dequantized to FP32")):
        other = Quantizer(FORMATS[name])(torch.ones(32, 32))
        assert engine.route(other, weight).name == route
    assert engine.route(torch.ones(32, 32), weight).name == "dequantized to FP32"
    assert engine.route(torch.ones(32, 32).bfloat16(), weight).name == "exact BF16"


@pytest.mark.parametrize(
    "name", ["nvfp4", "mxfp8-e4m3", "int4-1x32", "fp8 1x128 pow2", "nvfp4 rows"]
)
def test_values_of_fprop_are_transposed(name):
    """In BF16 if both operands are exact in it, else in FP32: the same numbers in either case.

    Scales of rows lie along the terms of the product.
    """
    engine, device = FusedEngine(HOPPER), "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(5)).to(device)
    q = Quantizer(ALL[name])(x)
    gradients = {
        "bf16": torch.ones(8, 40, device=device).bfloat16(),
        "fp32": torch.ones(8, 40, device=device),
        "codes": Quantizer(FORMATS["nvfp4"])(torch.ones(8, 40, device=device)),
        "tiles": Quantizer(FORMATS["fp8-1x128-e4m3"])(torch.ones(8, 40, device=device)),
    }
    for kind, gradient in gradients.items():
        exact = kind in ("bf16", "codes") and name not in ("int4-1x32", "nvfp4 rows")
        seen = engine.transpose(q, gradient)
        assert isinstance(seen, ExactBF16 if exact else torch.Tensor)
        assert torch.equal(plain(seen), q.dequantize().t())


def test_values_with_scales_of_rows_are_rounded_to_bf16():
    q = Quantizer(ALL["nvfp4 rows"])(torch.randn(40, 64) * torch.arange(1.0, 41.0)[:, None])
    assert torch.equal(FusedEngine(HOPPER).dequantize(q, torch.bfloat16), q.dequantize().bfloat16())


def matrix(rows, columns, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_product_with_a_bias_is_rounded_once(monkeypatch, dtype):
    """257 is no BF16 number, but 1 is."""
    seen = []

    def product(lhs, rhs, dtype):
        seen.append(dtype)
        return torch.full((2, 2), 257.0).to(dtype)

    monkeypatch.setitem(gemms.GEMMS, routes.TENSORS, product)
    bias = torch.full((2,), -256.0, dtype=torch.bfloat16, requires_grad=True)
    lhs, rhs = (Quantizer(FORMATS["fp8-tensor-e4m3"])(torch.ones(2, 2)) for _ in range(2))
    total = gemms.multiply(routes.TENSORS, lhs, rhs, bias, dtype)
    assert total.dtype is dtype and (total == 1).all()
    gemms.multiply(routes.TENSORS, lhs, rhs, None, dtype)
    assert seen == [torch.float32, torch.bfloat16 if dtype is torch.bfloat16 else torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 384, 512), (250, 77, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_products(pair, dtype, shape):
    rows, columns, length = shape
    a, b = matrix(rows, length, 0), matrix(columns, length, 1)
    lhs, rhs = names(pair)
    engine = select_engine(a.device)
    left, _ = engine.quantize(a, Request(Quantizer(lhs), partner=rhs), None)
    right = b
    if rhs is not None:
        right, _ = engine.quantize(b, Request(Quantizer(rhs), partner=lhs), None)
    bias = torch.randn(columns, device="cuda")
    seen = engine.gemm(left, right, bias, None, dtype)
    assert seen.dtype is dtype and seen.shape == (rows, columns)
    exact = [Quantizer(lhs)(a).dequantize().double()]
    exact.append(b.double() if rhs is None else Quantizer(rhs)(b).dequantize().double())
    expected = exact[0] @ exact[1].t() + bias
    magnitude = exact[0].abs() @ exact[1].abs().t() + bias.abs()
    rounding = 2.0**-8 * expected.abs() * 1.01 if dtype is torch.bfloat16 else 0
    bound = BOUNDS[PAIRS[pair]](length) * magnitude
    assert ((seen.double() - expected).abs() <= bound + rounding).all()
    product, before = expected - bias, torch.randn(rows, columns, device="cuda")
    for beta in (True, False):
        total = before.clone()
        assert engine.gemm(left, right, into=(total, beta)) is total
        expected = before.double() + product if beta else product
        assert ((total.double() - expected).abs() <= bound + 2.0**-23 * expected.abs()).all()


RECIPES = ["fp8-tile", "mxfp4-backward", "nvfp4", "nvfp4-fold", "mxfp8", "fp8-delayed", "fp8-row",
           "nvfp4-4over6", "quartet2", "nvfp4-ue5m3", "torchao-v2", "nvfp4-backward",
           "averis", "tetrajet2"]  # fmt: skip
RECIPES += [name for name in shipped_recipes() if name.startswith("qat-")]
WITHOUT_KERNELS = ["if4"]
CHANGED = {
    "fp8-tile of 64": ("input.block=64", "weight.block=64", "grad.block=64"),
    "nvfp4 of fprop": ("wgrad.hadamard=none", "weight.axis=fprop", "input.axis=fprop"),
    "nvfp4 SR": ("weight.axis=fprop", "weight.rounding=stochastic"),
    "nvfp4 rows": ("input.row_scaled=true", "grad.row_scaled=true"),
    "nvfp4 rows requantized": ("input.row_scaled=true", "wgrad.input.requantize=true"),
    "nvfp4 SR backward": ("dgrad.weight.rounding=stochastic", "wgrad.input.rounding=stochastic"),
}


def layer(recipe, engine):
    """Return a function that runs a linear layer, forward and backward: Y, dX, dW."""
    overrides = CHANGED.get(recipe, ())
    recipe = load_recipe(recipe.partition(" ")[0], overrides)
    precision = recipe.precision_for(Layer("decoder.layers.5.mlp.linear_fc1", 5, 30))
    history = None
    if precision.history_length:
        history = AmaxHistory(len(OPERANDS), precision.history_length, torch.device("cuda"))
    x, weight = matrix(512, 384, 2).requires_grad_(), matrix(256, 384, 3).requires_grad_()
    grad = matrix(512, 256, 4)

    def run():
        x.grad = weight.grad = None
        y = lowbit_linear(x, weight, LinearContext(precision, engine, 11, amax_history=history))
        y.backward(grad)
        return y.detach(), x.grad, weight.grad

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [*RECIPES, *WITHOUT_KERNELS, *CHANGED])
def test_a_linear_layer_is_the_references(recipe):
    engines = ReferenceEngine("as the test's"), select_engine(torch.device("cuda"))
    expected, seen = (layer(recipe, engine)() for engine in engines)
    for one, other in zip(expected, seen, strict=True):
        assert (other.float() - one.float()).norm() <= 4e-3 * one.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_never_waits_for_the_gpu(recipe):
    run = layer(recipe, select_engine(torch.device("cuda")))
    for _ in range(cublas._OFTEN):  # compiles kernels, and times cuBLAS's algorithms
        run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_unsupported_input_has_one_clear_line():
    engine, request = select_engine(torch.device("cuda")), Request(Quantizer(FORMATS["nvfp4"]))
    with pytest.raises(TypeError, match=r"float32 or bfloat16, not torch\.float16"):
        engine.quantize(torch.ones(16, 16, device="cuda").half(), request, None)


@pytest.mark.gpu
def test_no_tokens():
    engine = select_engine(torch.device("cuda"))
    empty, weight = torch.zeros(0, 64, device="cuda").bfloat16(), matrix(32, 64, 0)
    for pair in PAIRS:
        lhs, rhs = names(pair)
        left, _ = engine.quantize(empty, Request(Quantizer(lhs), partner=rhs), None)
        right = weight
        if rhs is not None:
            right, _ = engine.quantize(weight, Request(Quantizer(rhs), partner=lhs), None)
        assert engine.gemm(left, right).shape == gemm(empty, weight).shape


@pytest.mark.gpu
def test_more_elements_than_31_bits_count():
    x = torch.empty(2**15 + 64, 2**16, dtype=torch.bfloat16, device="cuda")
    x[:-64] = 1
    x[-64:] = matrix(64, 2**16, 0)
    engine = select_engine(x.device)
    request = Request(Quantizer(FORMATS["mxfp4"]), needs_codes=True)
    row, col = engine.quantize(x, request, replace(request))
    for seen, tail in ((row, x[-64:]), (col, x[-64:].t())):
        expected = request.quantizer(tail)
        part = (slice(-64, None),) if seen is row else (slice(None), slice(-32, None))
        assert torch.equal(seen.codes[part], expected.codes)
