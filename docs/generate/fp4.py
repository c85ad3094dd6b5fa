"""Compute the tables of docs/research/fp4.md: errors of FP4 methods on Gaussian and model tensors.

    python docs/generate/fp4.py

The reference arithmetic on a CPU, from fixed seeds, in minutes; renews what stands between the
page's markers. The model's tensors are of a small transformer that the script trains on the
source of Python's standard library.
"""

import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import yaml
from fp8 import normal
from render import ROOT, parser, replace_sections, table
from torch import Tensor, nn

from megatron_lowbit.numerics import (
    Draw,
    Hadamard,
    Quantizer,
    Request,
    Rounding,
    format_by_name,
    hadamard_transform,
)

TENSORS, ROWS, COLUMNS = 8, 512, 1024
"""Number of Gaussian tensors, and their size."""
WIDTH, DEPTH, CONTEXT, BATCH, STEPS = 256, 4, 128, 16, 300
"""The model: features, layers, bytes of a sequence, sequences of a step, steps."""
KEY = 7


class Method(NamedTuple):
    """A quantizer with the transform that it is meant for.

    ``published`` is 1000 times its mean squared error of N(0, 1) in the paper of Quartet II.
    """

    name: str
    quantizer: Quantizer
    hadamard: Hadamard | None = None
    published: float | None = None

    def error(self, x: Tensor) -> Tensor:
        """Return the squared error of each element of x (R, K), after the transform, FP64."""
        request = Request(self.quantizer, self.hadamard, sign_key=KEY, draw=Draw(KEY))
        wanted = x if self.hadamard is None else hadamard_transform(x, self.hadamard, KEY)
        return (request.quantize(x).dequantize().double() - wanted.double()).square()


def methods(rounding: Rounding) -> list[Method]:
    """Return the methods of docs/templates/fp4.yaml that round in this way."""
    declared = yaml.safe_load((ROOT / "docs" / "templates" / "fp4.yaml").read_text())
    made = []
    for name, options in declared[rounding.value].items():
        format, published, mean, points = (
            options.pop(key, None) for key in ("format", "published", "mean", "points")
        )
        quantizer = Quantizer(format_by_name(format, **options), rounding, bool(mean))
        hadamard = Hadamard(points, "fresh") if points else None
        made.append(Method(name, quantizer, hadamard, published))
    return made


NEAREST, STOCHASTIC = methods(Rounding.NEAREST_EVEN), methods(Rounding.STOCHASTIC)


class Model(nn.Module):
    """A byte-level transformer; ``fc1`` of its third layer is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (B, T, 256) for bytes (B, T)."""
        x = self.bytes(text) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def trained_tensors() -> dict[str, Tensor]:
    """Train the model; return input, weight and output gradient of one layer at the last step."""
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    model, positions = Model(), torch.Generator().manual_seed(0)
    layer, tensors = model.layers[2].linear1, {}
    layer.register_forward_hook(lambda _, inputs, __: tensors.update(input=inputs[0]))
    layer.register_full_backward_hook(lambda _, __, grads: tensors.update(grad=grads[0]))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=positions)
        batch = text[starts + torch.arange(CONTEXT + 1)].long()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors["weight"] = layer.weight
    print(f"loss {loss.item():.3f} after {STEPS} steps")
    return {role: x.detach().flatten(0, -2).bfloat16().float() for role, x in tensors.items()}


def error_of_gaussian(method: Method) -> tuple[str, str, str | None]:
    """Return a method, its mean squared error with the standard error, and the published one."""
    tensors = (normal(seed, ROWS, COLUMNS) for seed in range(TENSORS))
    errors = torch.stack([method.error(x).mean() * 1000 for x in tensors])
    mean = f"{errors.mean():.2f} ± {errors.std() / math.sqrt(TENSORS):.2f}"
    return method.name, mean, method.published and str(method.published)


def ratios(tensors: dict[str, Tensor], methods: Sequence[Method]) -> str:
    """Return the table of signal-to-noise ratios in dB."""
    rows = []
    for method in methods:
        cells = [method.name]
        for x in tensors.values():
            # SQNR of all elements together, as in the quantization log.
            ratio = x.double().square().sum() / method.error(x).sum()
            cells.append(f"{10 * math.log10(ratio):.2f}")
        rows.append(cells)
    return table(("method", *tensors), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables into a page."""
    page = parser(__doc__, page=ROOT / "docs" / "research" / "fp4.md").parse_args(argv).page
    x, model = normal(0, ROWS, COLUMNS), trained_tensors()
    forward = {"N(0, 1)": x, "input": model["input"], "weight": model["weight"]}
    backward = {
        "N(0, 1)": x, "gradient": model["grad"], "its transpose": model["grad"].t().contiguous(),
    }  # fmt: skip
    sections = {
        "gaussian": table(
            ("method", "1000 x MSE", "published"), map(error_of_gaussian, (*NEAREST, *STOCHASTIC))
        ),
        "nearest": ratios(forward, NEAREST),
        "stochastic": ratios(backward, STOCHASTIC),
    }
    replace_sections(page, sections)


if __name__ == "__main__":
    main()
