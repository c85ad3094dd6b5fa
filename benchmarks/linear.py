"""Forward and backward of one linear layer: recipes, Transformer Engine and torchao in turns.

    python -m benchmarks linear            16384 tokens, 4096 -> 14336
    python -m benchmarks linear --sweep    ten more sizes, one of them ragged

BF16 input and weight, gradients of both in BF16 by plain autograd. A recipe computes as it does in
a block in the middle of a model; "square" has wgrad's input in 128x128 tiles. The bound is counted:
FLOPs of the three GEMMs at the rates measured for their operand formats, plus the bytes that
quantization must read and write at the rate of a copy. Bytes kept are what forward leaves allocated
for backward, without the output: the input's share grows with the tokens, the rest is the weight's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import runner, timing
from benchmarks.timing import Ceilings, Step
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.numerics import AmaxHistory, Quantizer
from megatron_lowbit.planning.device import gemm_name
from megatron_lowbit.recipes import OPERANDS, Layer, LinearPrecision, load_recipe


class Size(NamedTuple):
    """Tokens, input features and output features."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """FLOPs of one GEMM; all three have as many."""
        return 2 * self.tokens * self.inputs * self.outputs

    def __str__(self) -> str:
        return f"{self.tokens} x {self.inputs} -> {self.outputs}"


DEFAULT = Size(16384, 4096, 14336)
SWEEP = [
    DEFAULT,
    *(
        Size(tokens, *features)
        for tokens in (4096, 16384, 65536)
        for features in ((1024, 4096), (4096, 14336), (8192, 8192))
        if (tokens, *features) != DEFAULT
    ),
    Size(4024, 4104, 1000),
]


class Built(NamedTuple):
    """A layer that is ready to run, and its weight."""

    forward: Callable[[Tensor], Tensor]
    weight: Tensor


class Contender(NamedTuple):
    """Function that makes a layer, and the recipe that its bound is counted for (None: no bound).

    What takes ``long``, to compile or to run, is measured only at the default size.
    """

    make: Callable[[Size], Built]
    like: str | None
    long: bool = False


def middle_precision(recipe: str) -> LinearPrecision:
    """Return the precision of a recipe, a name and settings, in a middle block of a model."""
    name, *settings = recipe.split()
    layer = Layer("decoder.layers.16.mlp.linear_fc1", 16, 32)
    return load_recipe(name, settings).precision_for(layer)


def _module(size: Size) -> nn.Linear:
    return nn.Linear(
        size.inputs, size.outputs, bias=False, dtype=torch.bfloat16, device=timing.device()
    )


def _bf16(size: Size) -> Built:
    weight = _module(size).weight
    return Built(lambda x: F.linear(x, weight), weight)


def with_recipe(name: str, size: Size) -> Built:
    """Build a layer under a recipe, a name and settings."""
    weight, precision = _module(size).weight, middle_precision(name)
    history = None
    if precision.history_length:
        history = AmaxHistory(len(OPERANDS), precision.history_length, weight.device)
        # Of as many steps as count: scales come from the history, as in all but the first steps.
        history.entries.fill_(5.0)
    engine = select_engine(weight.device)
    context = LinearContext(precision, engine, key=1234, amax_history=history)
    return Built(partial(lowbit_linear, weight=weight, context=context), weight)


def _transformer_engine(recipe: str | None, size: Size) -> Built:
    from transformer_engine.common import recipe as te_recipes

    return _te_linear(getattr(te_recipes, recipe)() if recipe else None, size)


def _in_transformer_engine(name: str, size: Size) -> Built:
    """Build Transformer Engine's layer under a recipe, with its kernels or ours."""
    from megatron_lowbit.transformer_engine.recipe import to_te_recipe

    return _te_linear(to_te_recipe(middle_precision(name)), size)


def _te_reference(size: Size) -> Built:
    """Build Transformer Engine's own reference of NVFP4, for a GPU without it."""
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory

    return _te_linear(CustomRecipe(qfactory=nvfp4_ref_rht_2d_factory), size)


def _te_linear(chosen, size: Size) -> Built:
    import transformer_engine.pytorch as te

    layer = te.Linear(size.inputs, size.outputs, bias=False, params_dtype=torch.bfloat16)

    def forward(x: Tensor) -> Tensor:
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            return layer(x)

    return Built(forward, layer.weight)


def _torchao_blockwise(size: Size) -> Built:
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

    layer = Float8BlockwiseLinear.from_float(_module(size))
    return Built(layer, layer.weight)


def _torchao_float8(recipe: str, size: Size) -> Built:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    layer = convert_to_float8_training(_module(size), config=config)
    return Built(torch.compile(layer, dynamic=False), layer.weight)


SQUARE_INPUT = "wgrad.input.format=fp8-128x128-e4m3"
RECIPES = {
    "fp8-tile": "fp8-tile",
    "fp8-tile, square": f"fp8-tile {SQUARE_INPUT}",
    "fp8-delayed": "fp8-delayed",
    "fp8-row": "fp8-row",
    "mxfp8": "mxfp8",
    "mxfp4-backward": "mxfp4-backward",
    "nvfp4": "nvfp4",
    "nvfp4-fold": "nvfp4-fold",
}
CONTENDERS = {
    "BF16": Contender(_bf16, "bf16"),
    **{name: Contender(partial(with_recipe, recipe), recipe) for name, recipe in RECIPES.items()},
    "TE BF16": Contender(partial(_transformer_engine, None), "bf16"),
    "TE blockwise": Contender(partial(_transformer_engine, "Float8BlockScaling"), "fp8-tile"),
    "TE delayed": Contender(partial(_transformer_engine, "DelayedScaling"), "fp8-delayed"),
    "TE current": Contender(partial(_transformer_engine, "Float8CurrentScaling"), "fp8-tensorwise"),
    **{
        f"{name} in TE": Contender(partial(_in_transformer_engine, name), name)
        for name in ("fp8-tile", "mxfp8", "mxfp4-backward", "nvfp4", "nvfp4-fold")
    },
    "TE nvfp4 reference": Contender(_te_reference, None, long=True),
    "torchao blockwise": Contender(_torchao_blockwise, "fp8-tile"),
    "torchao rowwise": Contender(partial(_torchao_float8, "rowwise"), "fp8-row", long=True),
    "torchao tensorwise": Contender(
        partial(_torchao_float8, "tensorwise"), "fp8-tensorwise", long=True
    ),
}


def gemm_kinds(precision: LinearPrecision) -> dict[str, str]:
    """Return which of the measured GEMMs carries out each GEMM of a layer on Hopper."""
    return {gemm: gemm_name(precision, gemm, (9, 0), False) for gemm in precision.gemms}


def _kept_bytes(quantizer: Quantizer) -> float:
    """Return the bytes per element that are kept until backward."""
    format = quantizer.format
    return (format.element.bits + format.scale_bits / (format.block * format.block_rows)) / 8


def quantization_bytes(precision: LinearPrecision, size: Size) -> tuple[float, float]:
    """Return the least bytes that quantization reads and writes in forward and in backward.

    A BF16 source is read once for all its operands, and once more where folding or a scale of the
    tensor or of a row needs its own amax; each operand is written in the form that its GEMM takes,
    scales not counted.
    """
    delayed = precision.history_length > 0
    routes = gemm_kinds(precision)
    forms = {gemm: 2 if route == "bf16" else 1 for gemm, route in routes.items()}
    elements = {
        "input": size.tokens * size.inputs,
        "weight": size.inputs * size.outputs,
        "grad": size.tokens * size.outputs,
    }
    quantizers = {(gemm, role): q for gemm, role, q in precision.operands() if q is not None}

    def source(role: str, *gemms: str) -> float:
        sources = [(gemm, quantizers[gemm, role]) for gemm in gemms if (gemm, role) in quantizers]
        amaxes = (
            q.format.row_scaled
            or (q.format.tensor_scaled and not delayed)
            or (
                q.format.folds
                and routes[gemm] == "fp8 per tensor"
                # Four bits are kept, and folded in backward by what their scales say.
                and not ((gemm, role) == ("wgrad", "input") and q.format.element.bits == 4)
            )
            for gemm, q in sources
        )
        passes = bool(sources) + any(amaxes)
        return 2 * passes * elements[role]

    def written(gemm: str, role: str) -> float:
        return forms[gemm] * elements[role] if (gemm, role) in quantizers else 0

    fprop = quantizers.get(("fprop", "weight"))
    shared = (
        fprop is not None and fprop.format.square and fprop == quantizers.get(("dgrad", "weight"))
    )
    forward = source("input", "fprop", "wgrad")
    forward += source("weight", "fprop", *(["dgrad"] if shared else []))
    forward += written("fprop", "input") + written("fprop", "weight")
    backward = source("grad", "dgrad", "wgrad")
    backward += written("dgrad", "grad") + written("wgrad", "grad")
    if (kept := quantizers.get(("wgrad", "input"))) is not None:
        forward += _kept_bytes(kept) * elements["input"]
        if kept.format.element.bits != 8 * forms["wgrad"]:
            backward += (_kept_bytes(kept) + forms["wgrad"]) * elements["input"]
    if not shared:
        backward += source("weight", "dgrad") + written("dgrad", "weight")
    elif forms["dgrad"] == 1:  # 8-bit GEMMs read both operands along K: a transposed copy
        backward += written("dgrad", "weight")
    return forward, backward


def bound(precision: LinearPrecision, size: Size, limits: Ceilings) -> dict[str, float] | None:
    """Return least times in ms by FLOPs and bytes; None where the device lacks a GEMM."""
    routes = gemm_kinds(precision)
    seconds = {gemm: limits.seconds(size.flops, route) for gemm, route in routes.items()}
    if None in seconds.values():
        return None
    moved = [count / limits.copy for count in quantization_bytes(precision, size)]
    forward = 1e3 * (seconds["fprop"] + moved[0])
    backward = 1e3 * (seconds["dgrad"] + seconds["wgrad"] + moved[1])
    return {"forward": forward, "backward": backward, "both": forward + backward}


def kept_bytes(built: Built, size: Size, times: int = 1) -> int:
    """Return bytes that forward leaves allocated for backward, the output not counted."""
    tokens = times * size.tokens
    leaf = torch.randn(tokens, size.inputs, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    # Not a leaf: its memory is free unless the layer keeps it.
    x = leaf.clone()
    before = torch.cuda.memory_allocated() - x.nbytes
    y = built.forward(x)
    del x
    return torch.cuda.memory_allocated() - before - y.nbytes


def _kept(contender: Contender, built: Built, size: Size) -> dict[str, float]:
    if not torch.cuda.is_available() or contender.long:
        return {}
    once, twice = (kept_bytes(built, size, times) for times in (1, 2))
    per_element = (twice - once) / (size.tokens * size.inputs)
    weight = (2 * once - twice) / (size.inputs * size.outputs)
    return {
        "kept_bytes_per_input_element": round(per_element, 4),
        "kept_bytes_per_weight_element": round(weight, 4),
    }


def step(built: Built, x: Tensor, grad: Tensor) -> Step:
    """Return forward and backward of a layer, of x and of the output's gradient."""

    def run(mark: timing.Mark) -> None:
        x.grad = built.weight.grad = None
        y = built.forward(x)
        mark()
        y.backward(grad)

    return run


def run(
    size: Size,
    names: Sequence[str],
    limits: Ceilings,
    seconds: float,
    contenders: Mapping[str, Contender] = CONTENDERS,
) -> list[dict]:
    """Measure one size: times, rates and bytes of each contender, or why it refuses."""
    options = {"dtype": torch.bfloat16, "device": timing.device()}
    x = torch.randn(size.tokens, size.inputs, **options, requires_grad=True)
    grad = torch.randn(size.tokens, size.outputs, **options)
    kept: dict[str, dict] = {}

    def builder(name: str) -> Step:
        contender = contenders[name]
        if contender.long and size != DEFAULT:
            raise RuntimeError(f"takes long: measured for {DEFAULT} only")
        built = contender.make(size)
        built.forward(x)  # libraries allocate their workspaces in the first call
        kept[name] = _kept(contender, built, size)
        return step(built, x, grad)

    def row(name: str, laps: list[list[float]]) -> dict:
        return _row(contenders[name].like, size, laps, limits) | kept[name]

    builders = {name: partial(builder, name) for name in names}
    rows = runner.rows_of(builders, row, {"size": list(size)}, seconds)
    for key, base in (("times_bf16", "BF16"), ("times_te_blockwise", "TE blockwise")):
        runner.add_ratios(rows, key, base, "forward", "backward", "both")
    return rows


def _row(like: str | None, size: Size, laps: list[list[float]], limits: Ceilings) -> dict:
    row: dict = timing.phases(laps)
    rate = 3 * size.flops / (row["both"]["median_ms"] / 1e3)
    figures: dict = {"tflop_per_s": round(rate / 1e12, 4)}
    figures["of_bf16_gemm"] = round(rate / limits.gemms["bf16"], 3)
    if like is not None and (least := bound(middle_precision(like), size, limits)) is not None:
        figures["bound_ms"] = {phase: round(value, 4) for phase, value in least.items()}
        figures["over_bound"] = {p: round(row[p]["median_ms"] / v, 3) for p, v in least.items()}
    return row | figures


COLUMNS = {
    "forward ms": "forward", "backward ms": "backward", "both ms": "both",
    "x BF16": "times_bf16.both", "over bound": "over_bound.both",
}  # fmt: skip
main = runner.over_sizes("linear", __doc__, CONTENDERS, SWEEP, run, COLUMNS)
