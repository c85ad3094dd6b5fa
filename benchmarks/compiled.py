"""Compiled transformer blocks in plain PyTorch: converted by this project and by torchao.

    python -m benchmarks compiled

Forward and backward of four blocks of Llama-3-8B, 4 sequences of 4096 random tokens in BF16, no
optimizer. Each contender is ``torch.compile(model, fullgraph=True)`` of the same blocks, "eager"
the same without it. Weights are quantized in every step.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from benchmarks import records, runner, timing
from megatron_lowbit import convert
from megatron_lowbit.recipes import load_recipe

OWN = ("fp8-tensorwise", "fp8-row", "fp8-tile", "mxfp8", "nvfp4")
EAGER = ("bf16", "fp8-tile", "mxfp8")
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MXFP8 = ("mxfp8_rceil", "mxfp8_emulated_rceil")
PEERS = tuple(f"torchao {name}" for name in (*FLOAT8, *MXFP8))
HIDDEN, MLP, HEADS, GROUPS, BLOCKS = 4096, 14336, 32, 8, 4
SHAPE = (4, 4096)
TINY = (1, 128)


class Block(nn.Module):
    """A block of Llama 3; ``shrink`` divides its widths."""

    def __init__(self, shrink: int) -> None:
        super().__init__()
        hidden, mlp = HIDDEN // shrink, MLP // shrink
        self.head = hidden // HEADS
        groups = GROUPS * self.head
        linear = partial(nn.Linear, bias=False)
        self.input_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q_proj, self.o_proj = linear(hidden, hidden), linear(hidden, hidden)
        self.k_proj, self.v_proj = linear(hidden, groups), linear(hidden, groups)
        self.gate_proj, self.up_proj = linear(hidden, mlp), linear(hidden, mlp)
        self.down_proj = linear(mlp, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's output for x of (sequences, tokens, hidden)."""
        y = self.input_norm(x)
        q, k, v = (self._heads(part(y)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(x.shape))
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head).transpose(1, 2)


class Blocks(nn.Module):
    """Blocks one after another, with common rotary embeddings."""

    def __init__(self, tokens: int, shrink: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shrink) for _ in range(BLOCKS))
        head = HIDDEN // shrink // HEADS
        frequencies = 500000 ** -(torch.arange(0, head, 2) / head)
        angles = torch.arange(tokens)[:, None] * torch.cat([frequencies, frequencies])
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last block."""
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def converted(model: nn.Module, name: str) -> nn.Module:
    """Return the model with its linear layers in a precision of a recipe or of torchao."""
    if not name.startswith("torchao "):
        changes = ["bf16_blocks=none"] if name == "nvfp4" else []
        return convert(model, load_recipe(name, changes))
    kind = name.removeprefix("torchao ")
    if kind in FLOAT8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(kind))
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe(kind))
    quantize_(model, config, filter_fn=lambda module, _: isinstance(module, nn.Linear))
    return model


def step_of(name: str, shape: tuple[int, int], shrink: int, eager: bool) -> timing.Step:
    """Return forward and backward of the blocks in a precision."""
    device, generator = timing.device(), torch.Generator().manual_seed(0)
    with device:
        torch.manual_seed(0)
        blocks = Blocks(shape[1], shrink).bfloat16()
    model = converted(blocks, name)
    call = model if eager else torch.compile(model, fullgraph=True, dynamic=False)
    x = torch.randn(*shape, HIDDEN // shrink, generator=generator).bfloat16().to(device)
    grad = torch.randn(x.shape, generator=generator).bfloat16().to(device)
    x.requires_grad_()

    def step(mark: timing.Mark) -> None:
        y = call(x)
        mark()
        y.backward(grad)
        x.grad = None
        model.zero_grad()

    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all contenders, print a table, and keep the rows."""
    parser = records.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each contender")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders")
    parser.add_argument("--cpu", action="store_true", help="tiny blocks, to try the script out")
    records.add_output(parser, "compiled")
    args = parser.parse_args(argv)
    shape, shrink = (TINY, 16) if args.cpu else (SHAPE, 1)
    names = ["bf16", *OWN, *PEERS]
    builders: dict[str, Callable[[], timing.Step]] = {
        **{name: partial(step_of, name, shape, shrink, False) for name in names},
        **{f"{name}, eager": partial(step_of, name, shape, shrink, True) for name in EAGER},
    }
    torch._dynamo.config.recompile_limit = len(builders) + 1  # all are one function to torch
    chosen = {k: make for k, make in builders.items() if not args.only or k in args.only}
    rows = runner.rows_of(
        chosen, lambda _, laps: timing.phases(laps), {"tokens": shape[0] * shape[1]}, args.seconds
    )
    runner.add_ratios(rows, "x_bf16", "bf16", "both")
    columns = {part: f"{part}.median_ms" for part in ("forward", "backward", "both")}
    Console(width=100).print(runner.table(rows, "Compiled", {**columns, "x BF16": "x_bf16"}))
    records.write(args.output, {}, rows=rows)
