"""Recipes through Transformer Engine: what is native, and this project's bits inside its layers."""

from copy import deepcopy

import pytest
import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext, WeightCache, lowbit_linear
from megatron_lowbit.numerics import FORMATS, Hadamard, Quantizer, Request
from megatron_lowbit.recipes import Layer, load_recipe
from megatron_lowbit.transformer_engine.native import native_recipe
from tests import processes
from tests.transformer_engine.stand_in import QuantizedLinear, use_stand_ins

HOPPER, BLACKWELL = (9, 0), (10, 0)
MIDDLE = Layer("decoder.layers.16.mlp.linear_fc1", 16, 32)
TILES = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
FP4 = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")


def precision(recipe, *settings):
    # megatron-core copies what it hands to modules: no object is the same there.
    return deepcopy(load_recipe(recipe, list(settings)).precision_for(MIDDLE))


@pytest.mark.parametrize(
    ("recipe", "settings", "name", "arguments", "power_2"),
    [
        ("fp8-tile", (), "Float8BlockScaling", {"fp8_format": "HYBRID"} | TILES, True),
        ("fp8-tile-e4m3", (), "Float8BlockScaling", {"fp8_format": "E4M3"} | TILES, False),
        (
            "fp8-tile",
            ("weight.format=fp8-1x128-e4m3",),
            "Float8BlockScaling",
            {"fp8_format": "HYBRID"} | TILES | {"w_block_scaling_dim": 1},
            True,
        ),
        ("fp8-tensorwise", (), "Float8CurrentScaling", {"fp8_format": "HYBRID"}, False),
        (
            "fp8-delayed",
            ("amax_history.length=32",),
            "DelayedScaling",
            {"fp8_format": "HYBRID", "amax_history_len": 32, "amax_compute_algo": "max"},
            None,
        ),
        (
            "mxfp8",
            (),
            "MXFP8BlockScaling",
            {"fp8_format": "E4M3", "enable_2d_quantization": False},
            None,
        ),
        ("nvfp4", (), "NVFP4BlockScaling", dict.fromkeys(FP4, False), None),
        (
            "nvfp4",
            ("grad.rounding=nearest", "wgrad.hadamard=null", "weight.format=nvfp4"),
            "NVFP4BlockScaling",
            dict.fromkeys(FP4, True),
            None,
        ),
    ],
)
def test_native_where_the_gpu_has_it(recipe, settings, name, arguments, power_2):
    found = native_recipe(precision(recipe, *settings), BLACKWELL)
    assert (found.name, found.arguments, found.power_2_scale) == (name, arguments, power_2)


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4-backward", "bf16"])
def test_nothing_native_for_other_formats(recipe):
    assert native_recipe(precision(recipe), BLACKWELL) is None


@pytest.mark.parametrize(("recipe", "block"), [("fp8-tile", 64), ("mxfp8", 16)])
def test_nothing_native_for_other_blocks(recipe, block):
    for roles in (("weight",), ("input", "weight", "grad")):
        changed = precision(recipe, *(f"{role}.block={block}" for role in roles))
        assert native_recipe(changed, BLACKWELL) is None


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_nothing_native_on_a_gpu_without_the_format(recipe):
    assert native_recipe(precision(recipe), HOPPER) is None


@pytest.mark.parametrize(
    ("recipe", "settings", "named"),
    [
        ("fp8-tile", "wgrad.input.format=fp8-128x128-e4m3", "input with one block"),
        ("fp8-tile", "grad.rounding=stochastic", "rounding of each role"),
        ("fp8-tensorwise", "tensor_scale=group", "tensor_scale: group"),
        ("fp8-delayed", "amax_history.algorithm=average", "algorithm: average"),
        ("fp8-delayed", "amax_history.just_in_time=1", "just_in_time"),
        (
            "mxfp8",
            "input.scale_rounding=floor weight.scale_rounding=floor grad.scale_rounding=floor",
            "scale_rounding: floor",
        ),
        ("nvfp4", "wgrad.hadamard.size=32", "hadamard transform but of 16 points"),
        ("nvfp4", "grad.format=nvfp4-2d", "16x16 blocks but for weights"),
    ],
)
def test_a_switch_that_it_lacks_is_refused(recipe, settings, named):
    with pytest.raises(UserError, match=named) as refused:
        native_recipe(precision(recipe, *settings.split()), BLACKWELL)
    assert "--transformer-impl local" in str(refused.value)


@pytest.mark.parametrize("recipe", ["fp8-tile", "nvfp4", "mxfp4-backward", "qat-nvfp4", "quartet2"])
@pytest.mark.parametrize("saves_input", [False, True])
def test_its_modules_order_of_calls_gives_what_ours_gives(monkeypatch, recipe, saves_input):
    """Microbatches with one quantized weight; one is dropped, and the last goes back first."""
    use_stand_ins(monkeypatch)
    from megatron_lowbit.transformer_engine.quantizers import Factory

    wanted, engine = precision(recipe), ReferenceEngine("tests")
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=draws).bfloat16()
    xs = [torch.randn(32, 64, generator=draws).bfloat16() for _ in range(3)]
    grads = [torch.randn(32, 96, generator=draws).bfloat16() for _ in range(3)]

    def passes(weight, product):
        torch.manual_seed(3)
        inputs = [x.clone().requires_grad_() for x in xs]
        ys = [product(x, first) for x, first in zip(inputs, (True, False, False), strict=True)]
        del ys[1], inputs[1]
        for y, grad in zip(reversed(ys), grads, strict=False):
            y.backward(grad)
        return [*ys, *(x.grad for x in inputs), weight.grad]

    plain, cache = weight.clone().requires_grad_(), WeightCache()

    def ours(x, _):
        key = int(torch.randint(2**63 - 1, ())) if wanted.stochastic else 0
        context = LinearContext(wanted, engine, key, weight_cache=cache, saves_input=saves_input)
        return lowbit_linear(x, plain, context)

    layer = QuantizedLinear(weight.clone(), Factory(wanted, engine), saves_input)
    seen, expected = passes(layer.weight, layer), passes(plain, ours)
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def test_nothing_of_it_is_imported_without_a_request(start_script, tmp_path):
    """Megatron-LM imports Transformer Engine itself if it is installed; our layers wait.

    The module of factories, which Megatron-LM's own scripts import, imports neither.
    """
    script, output = tmp_path / "script.py", tmp_path / "output.txt"
    script.write_text("""
import sys
for name in [*sys.modules]:  # what other tests have imported
    if name.partition(".")[0] in ("megatron", "megatron_lowbit", "transformer_engine"):
        del sys.modules[name]
import megatron_lowbit.factories
assert not {"megatron", "transformer_engine"} & sys.modules.keys()
from megatron_lowbit.megatron import pretrain, recipe_hook
sys.exit(any(name.startswith("megatron_lowbit.transformer_engine.") for name in sys.modules))
""")
    process = start_script(script, output=output)
    assert processes.finish([process], timeout=60) == [0], output.read_text()[-2000:]


# -- on a GPU with Transformer Engine --------------------------------------------------------------

RECIPES = ["fp8-tile", "fp8-tile-e4m3", "fp8-tensorwise", "fp8-row", "mxfp8", "nvfp4", "mxfp4",
           "mxfp4-backward"]  # fmt: skip


@pytest.fixture
def te():
    """transformer_engine.pytorch; only in this fixture's tests, for its import is a long one."""
    return pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)


def values(*shape, seed=0):
    draws = torch.Generator("cuda").manual_seed(seed)
    spread = torch.randn(shape, device="cuda", generator=draws)
    return (torch.randn(shape, device="cuda", generator=draws) * spread.exp()).bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_its_linear_layer_gives_what_ours_gives(te, recipe, bias):
    from megatron_lowbit.transformer_engine.recipe import to_te_recipe

    wanted = precision(recipe)
    layer = te.Linear(256, 384, bias=bias, params_dtype=torch.bfloat16)
    x, grad = values(2, 64, 256).requires_grad_(), values(2, 64, 384, seed=1)
    torch.manual_seed(3)
    with te.autocast(enabled=True, recipe=to_te_recipe(wanted)):
        y = layer(x)
    y.backward(grad)
    seen = [y.detach(), x.grad.clone(), layer.weight.grad]
    with te.autocast(enabled=True, recipe=to_te_recipe(wanted)):
        layer(x)  # dropped, and in no one's way

    torch.manual_seed(3)
    key = int(torch.randint(2**63 - 1, ())) if wanted.stochastic else 0
    weight, x.grad = layer.weight.detach().clone().requires_grad_(), None
    y = lowbit_linear(
        x,
        weight,
        LinearContext(wanted, select_engine(x.device), key),
        bias=layer.bias.detach() if bias else None,
    )
    y.backward(grad)
    for one, other in zip((y.detach(), x.grad, weight.grad), seen, strict=True):
        if native_recipe(wanted, torch.cuda.get_device_capability()) is None:
            assert torch.equal(one, other)
        else:  # sums in another order
            assert (one.float() - other.float()).norm() <= 4e-3 * one.float().norm()
    if bias:
        exact = grad.float().sum((0, 1))
        assert (layer.bias.grad.float() - exact).abs().max() <= 2**-7 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_its_norm_alone_is_that_of_its_layer(te, normalization, zero_centered, by_kernel):
    """By this project's kernel but for the order of sums, and so with a residual's gradient."""
    from megatron_lowbit.transformer_engine.norm import normalized

    module = te.LayerNormLinear(
        256, 128, bias=False, normalization=normalization, zero_centered_gamma=zero_centered,
        params_dtype=torch.bfloat16, return_layernorm_output=True,
    )  # fmt: skip
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x, grad = values(2, 64, 256).requires_grad_(), values(2, 64, 256, seed=1)
    gains = [p for name, p in module.named_parameters() if name.startswith("layer_norm")]
    engine = select_engine(x.device) if by_kernel else ReferenceEngine("tests")
    theirs, (ours, residual, amax) = module(x)[1], normalized(x, module, engine)
    taken = by_kernel and normalization == "RMSNorm" and not zero_centered
    error = 2.0**-7 if taken else 0.0
    assert ((theirs - ours).abs() <= error * theirs.abs()).all()
    assert amax == ours.abs().max() if taken else amax is None
    seen, found = (torch.autograd.grad(y, [x, *gains], grad, True) for y in (theirs, ours))
    for one, other in zip(seen, found, strict=True):
        assert (one - other).norm() <= 0.01 * one.norm() if taken else torch.equal(one, other)
    both = torch.autograd.grad([ours, residual], x, [grad, x.detach()])[0].float()
    expected = seen[0].float() + x.float()
    rounding = 2.0**-8 * (seen[0].float().abs() + expected.abs())
    assert ((both - expected).abs() <= 1.01 * rounding + 2 * error * seen[0].abs().max()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
@pytest.mark.parametrize("transform", [False, True])
def test_nvfp4_bits_are_those_of_its_reference(te, tile, transform):
    if transform and tile != (1, 16):
        pytest.skip("weights have no transform")
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    x = values(512, 384)
    reference = NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=transform)
    theirs = reference.quantize(x)
    quantizer = Quantizer(FORMATS["nvfp4" if tile == (1, 16) else "nvfp4-2d"])
    transposed = Request(quantizer, hadamard=Hadamard() if transform else None, needs_codes=True)
    engine = select_engine(x.device)
    row, _ = engine.quantize(x, Request(quantizer, needs_codes=True), None)
    _, col = engine.quantize(x, None, transposed)
    for ours, codes, scales in (
        (row, theirs.data, theirs.scale),
        (col, theirs.data_t, theirs.scale_t),
    ):
        other_codes = ours.codes != codes.view(torch.uint8)
        other_scales = ours.scales.view(torch.uint8) != scales.view(torch.uint8)
        # Its transform is a matrix product: another order of sums, before rounding to BF16.
        allowed = 1e-3 if transform and ours is col else 0
        assert other_codes.float().mean() <= allowed and other_scales.float().mean() <= allowed
