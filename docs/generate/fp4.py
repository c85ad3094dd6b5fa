"""Compute the tables of docs/fp4.md: the error of FP4 methods on Gaussian and on a model's tensors.

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

import numpy as np
import torch
import torch.nn.functional as F
import yaml
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


def methods(rounding: Rounding, table: str) -> list[Method]:
    """Return the methods of a table: name, format and options, published error."""
    found = []
    for line in table.strip().splitlines():
        name, words, published = (cell.strip() for cell in line.split("|"))
        format, *given = words.split()
        options = {key: yaml.safe_load(value) for key, value in (w.split("=") for w in given)}
        mean, points = options.pop("mean", False), options.pop("points", None)
        quantizer = Quantizer(format_by_name(format, **options), rounding, mean)
        hadamard = Hadamard(points, "fresh") if points else None
        found.append(Method(name, quantizer, hadamard, float(published) if published else None))
    return found


SIX = "four_over_six=mse max_scale=256"
NEAREST = methods(Rounding.NEAREST_EVEN, f"""
    NVFP4                                  | nvfp4 | 9.0
    NVFP4, foldable scales                 | nvfp4 block_scales=foldable |
    four-over-six, `mse`                   | nvfp4 {SIX} | 7.6
    four-over-six, `mae`                   | nvfp4 four_over_six=mae max_scale=256 |
    four-over-six, `abs_max`               | nvfp4 four_over_six=abs_max max_scale=256 |
    four-over-six, `mse`, `max_scale: 448` | nvfp4 four_over_six=mse |
    Quartet II's forward                   | quartet2 |
    NVFP4, 16x16                           | nvfp4-2d | 12.4
    four-over-six, `mse`, 16x16            | nvfp4-2d {SIX} | 12.4
    UE5M3                                  | nvfp4-ue5m3 |
    UE5M3, no tensor scale                 | nvfp4-ue5m3 tensor_scaled=false |
    TetraJet-v2                            | tetrajet2 |
    Averis (NVFP4 residual)                | nvfp4 mean=true |
    MXFP4                                  | mxfp4 scale_rounding=rceil |
""")  # fmt: skip
STOCHASTIC = methods(
    Rounding.STOCHASTIC,
    f"""
    NVFP4, SR                         | nvfp4 |
    NVFP4, 16/17, SR                  | nvfp4 sixteen_seventeenths=true | 23.5
    four-over-six, `mse`, SR          | nvfp4 {SIX} |
    four-over-six, `mse`, 16/17, SR   | nvfp4 sixteen_seventeenths=true {SIX} | 17.5
    MS-EDEN, 128 points               | ms-eden points=128 | 9.4
    MS-EDEN of torchao, 128 points    | ms-eden points=128 arithmetic=torchao |
    UE5M3, SR                         | nvfp4-ue5m3 |
    TetraJet-v2, SR                   | tetrajet2 |
    Averis, SR                        | nvfp4 mean=true |
""",
)


def gaussian(seed: int) -> Tensor:
    """Return N(0, 1) from numpy, whose stream is the same everywhere."""
    numbers = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS), np.float32)
    return torch.from_numpy(numbers)


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
    model, places = Model(), torch.Generator().manual_seed(0)
    layer, found = model.layers[2].linear1, {}
    layer.register_forward_hook(lambda _, inputs, __: found.update(input=inputs[0]))
    layer.register_full_backward_hook(lambda _, __, grads: found.update(grad=grads[0]))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=places)
        batch = text[starts + torch.arange(CONTEXT + 1)].long()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found["weight"] = layer.weight
    print(f"loss {loss.item():.3f} after {STEPS} steps")
    return {role: x.detach().flatten(0, -2).bfloat16().float() for role, x in found.items()}


def error_of_gaussian(one: Method) -> tuple[str, str, str | None]:
    """Return a method, its mean squared error with the standard error, and the published one."""
    errors = torch.stack([one.error(gaussian(seed)).mean() * 1000 for seed in range(TENSORS)])
    spread = errors.std() / math.sqrt(TENSORS)
    return one.name, f"{errors.mean():.2f} ± {spread:.2f}", one.published and f"{one.published}"


def ratios(tensors: dict[str, Tensor], methods: Sequence[Method]) -> str:
    """Return the table of signal-to-noise ratios in dB."""
    rows = []
    for one in methods:
        cells = [one.name]
        for x in tensors.values():
            # SQNR of all elements together, as in the quantization log.
            ratio = x.double().square().sum() / one.error(x).sum()
            cells.append(f"{10 * math.log10(ratio):.2f}")
        rows.append(cells)
    return table(("method", *tensors), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables into a page."""
    page = parser(__doc__, page=ROOT / "docs" / "fp4.md").parse_args(argv).page
    x, model = gaussian(0), trained_tensors()
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
