"""Features that composition is examined for: arguments, ranks, models, references and bounds.

They are declared in cases/compose.yaml.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.training_steps import cases_file
from megatron_lowbit.recipes.load import read_recipe


class Bounds(NamedTuple):
    """Largest relative differences: the losses that are compared, the first gradient norm."""

    loss: float
    norm: float


DECLARED = cases_file("compose")
LAYERS: Mapping[str, str] = DECLARED["layers"]
RECIPES: Sequence[str] = DECLARED["recipes"]
BOUNDS = {name: Bounds(*pair) for name, pair in DECLARED["bounds"].items()}


class Feature(NamedTuple):
    """A feature of a run.

    Attributes:
        options: its arguments.
        sizes: parallel sizes that it sets, by dimension: tp, pp, cp, dp, ep, etp.
        model: part of the model, or of its recipe, that it changes; the reference has it, too.
        gpu: why it needs a GPU.
        saves: True if the run is resumed from a checkpoint that it has saved.
        partner: the feature that takes its place in what it is compared with, on the same ranks.
        shown: what the page has in place of its arguments.
    """

    options: str = ""
    sizes: Mapping[str, int] = {}
    model: str = ""
    gpu: str = ""
    saves: bool = False
    partner: str = ""
    shown: str = ""


FEATURES = {name: Feature(**attributes) for name, attributes in DECLARED["features"].items()}
PAIRS = [tuple(dict.fromkeys(pair)) for pair in combinations_with_replacement(FEATURES, 2)]
"""All pairs of features and, as a feature with itself, all single features, ordered alike."""

SPREAD = {"TP2", "SP", "CP2", "EP2", "ETP2"}
"""Features that split or spread layers over ranks."""


class Run(NamedTuple):
    """Description of a run: which features, layers and recipe it has.

    Attributes:
        features: names, in the order of ``FEATURES``.
        layers: "local" or "te".
        recipe: one of ``RECIPES``.
        on_gpu: True where it runs on GPUs.
        in_bf16: True for BF16 weights, which a CPU has with quantized parameters only.
        from_seed: True if it starts from random weights instead of a common checkpoint.
        alltoall: True for a reference whose tokens are dispatched as graphs of experts need it.
        seed: of random weights and mock data; None for Megatron-LM's default.
    """

    features: tuple[str, ...]
    layers: str
    recipe: str
    on_gpu: bool
    in_bf16: bool = False
    from_seed: bool = False
    alltoall: bool = False
    seed: int | None = None

    @property
    def key(self) -> str:
        """Name that no other run has."""
        extra = [name for name in ("in_bf16", "from_seed", "alltoall") if getattr(self, name)]
        extra += [] if self.seed is None else [f"seed-{self.seed}"]
        return " ".join((self.layers, self.recipe, *self.features, *extra))

    @property
    def ranks(self) -> int:
        """Number of processes."""
        sizes = self._sizes()
        dense = math.prod(sizes.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
        return max(dense, math.prod(sizes.get(name, 1) for name in ("ep", "etp", "pp")))

    @property
    def models(self) -> set[str]:
        """Changes of the model and of the recipe."""
        return {FEATURES[name].model for name in self.features} - {""}

    @property
    def captures_experts(self) -> bool:
        """True for graphs of layers with experts."""
        return "graphs" in self.features and "experts" in self.models

    @property
    def judged(self) -> int:
        """Number of first steps whose losses are compared: differences grow from step to step."""
        return 2

    def obstacle(self, gpus: int) -> tuple[str, str] | None:
        """Return why a machine with so many GPUs cannot run it, as an outcome and a message."""
        needed = [FEATURES[name].gpu for name in self.features if FEATURES[name].gpu]
        if needed and not gpus:
            return "needs a GPU", needed[0]
        if self.layers == "te" and "hybrid" in self.models and find_spec("mamba_ssm") is None:
            return "needs mamba-ssm", ""
        if gpus and self.ranks > gpus:
            return f"needs {self.ranks} GPUs", ""
        return None

    @property
    def architecture(self) -> tuple[str, ...]:
        """Changes of only the model: runs with the same ones share a start."""
        return tuple(sorted(self.models - {"delayed", "switch", "output"}))

    @property
    def iterations(self) -> int:
        """Length: CUDA graphs are captured after some iterations."""
        return 4 if self.on_gpu else 2

    @property
    def saves(self) -> bool:
        """True for a run that is resumed."""
        return any(FEATURES[name].saves for name in self.features)

    def reference(self) -> "Run":
        """Return the run that it is compared with."""
        partners = {FEATURES[name].partner for name in self.features} - {""}
        if partners:
            others = {name for name in self.features if not FEATURES[name].partner}
            kept = others - {"resume", "async-save", "recompute-full", "recompute-selective",
                             "graphs"} | partners  # fmt: skip
        else:
            kept = {name for name, feature in FEATURES.items()
                    if not feature.sizes and feature.model in self.models}  # fmt: skip
        features = tuple(name for name in FEATURES if name in kept)
        return self._replace(features=features, alltoall=self.captures_experts)

    def start(self) -> "Run":
        """Return the run of one process whose weights it starts from."""
        kept = {"MoE": "experts", "hybrid": "hybrid", "MLA": "latent", "MTP": "mtp"}
        features = tuple(name for name, part in kept.items() if part in self.architecture)
        return Run(features, self.layers, "bf16", self.on_gpu, seed=self.seed)

    def start_arguments(self, folder: Path) -> list[str]:
        """Return the arguments by which it writes its weights into a folder."""
        save = ["--save", str(folder), "--save-interval", "1", "--no-save-optim"]
        return ["--train-iters", "1", "--lr", "1e-2", *save]

    def length(self, folder: Path) -> list[str]:
        """Return its length, and what makes it begin with the weights of a folder."""
        words = ["--train-iters", str(self.iterations)]
        load = ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]
        return words if self.from_seed else words + load

    def describe(self) -> dict[str, Any]:
        """Return the beginning of its cell."""
        return {"layers": self.layers, "recipe": self.recipe, "features": self.features}

    def bounds(self) -> Bounds:
        """Return the largest differences from its reference that count as parity."""
        names = set(self.features)
        quantized = self.recipe != "bf16" or names & {"delayed", "switch", "output-layer"}
        floor = "BF16 sums" if self.on_gpu else "BF16 on a CPU" if self.in_bf16 else "exact"
        if not quantized:
            bounds = "sums"
        elif names & SPREAD and self.on_gpu:
            wide = self.recipe == "nvfp4" and names & {"MTP", "MLA"}
            bounds = "BF16 amplified" if wide else "BF16 split"
        elif names & {"EP2", "ETP2", "CP2"} or (names & {"TP2", "SP"} and "hybrid" in names):
            bounds = "spread"
        elif names & {"TP2", "SP"}:
            tile = "large flips" if names & {"delayed", "switch"} else "flips"
            bounds = "amplified" if self.recipe == "nvfp4" else tile
        else:
            bounds = "whole"
        return Bounds(*map(max, BOUNDS[bounds], BOUNDS[floor]))

    def arguments(self, recipe_file: Path) -> list[str]:
        """Return its command line, but for its length and folders."""
        words = [DECLARED["model"], *self._model()]
        words += [FEATURES[name].options for name in self.features]
        if self.in_bf16:
            words.append("--bf16")
        if self.seed is not None:
            words.append(f"--seed {self.seed}")
        if {"EP2", "EP2-overlap"} & {*self.features} and "ETP2" not in self.features:
            words.append("--expert-tensor-parallel-size 1")
        if "VPP" in self.features and "hybrid" not in self.models:
            words.append("--num-layers-per-virtual-pipeline-stage 1")
        if "graphs" in self.features:
            local = self.layers == "te" and not self.captures_experts
            implementation = "local" if local else "transformer_engine"
            words.append(f"--cuda-graph-impl {implementation} --cuda-graph-warmup-steps 1")
        if self.captures_experts:
            words.append(DECLARED["parts"])
        if self.captures_experts or self.alltoall:
            words.append(DECLARED["dispatcher"][self.layers])
        if self.on_gpu:
            # Sums in one order; TE splits sequences over ranks in its other implementations only.
            backend = "auto" if "CP2" in self.features else "unfused"
            words.append(f"--attention-backend {backend}")
        words.append(f"{DECLARED['gpu']} {LAYERS[self.layers]}" if self.on_gpu
                     else "--quantization-engine reference")  # fmt: skip
        return " ".join([*words, f"--precision-recipe {recipe_file}"]).split()

    def recipe_text(self) -> str:
        """Return the recipe as YAML: in all blocks, with delayed scaling or a switch if asked."""
        raw = read_recipe(self.recipe)
        configs, matchers = raw["configs"], raw["matchers"]
        matchers.pop("bf16_blocks", None)
        if self.recipe == "nvfp4":
            configs["nvfp4"]["tensor_scale"] = "group"  # on one device and on several the same bits
        if "delayed" in self.models:
            delayed = read_recipe("fp8-delayed")["configs"]["fp8"]
            delayed["amax_history"]["length"] = 1
            configs["delayed"] = delayed | {"tensor_scale": "group"}
            first = {"type": "glob", "pattern": "*self_attention*", "config": "delayed"}
            raw["matchers"] = {"attention": first | {"enabled": True}, **matchers}
        if "output" in self.models:
            configs["output"] = next(iter(read_recipe("fp8-tile")["configs"].values()))
            raw["output_layer"] = "output"
        if "switch" in self.models:
            target = "fp8-tile" if self.recipe == "bf16" else "bf16"
            raw["switches"] = {"change": {"iteration": self.iterations // 2, "to": target}}
        return yaml.safe_dump(raw, sort_keys=False)

    def _sizes(self) -> dict[str, int]:
        merged: dict[str, int] = {}
        for name in self.features:
            merged |= FEATURES[name].sizes
        return merged

    def _model(self) -> Iterable[str]:
        models = self.models
        yield DECLARED["latent" if "latent" in models else "grouped"]
        yield DECLARED["experts"] if "experts" in models else ""
        if "hybrid" in models:
            mlp = "E" if "experts" in models else "-"
            blocks = ["M", mlp, "+" if "latent" in models else "*", mlp]
            pattern = ("|" if "VPP" in self.features else "").join(blocks)
            if "mtp" in models:
                pattern += f"/{blocks[2]}{blocks[3]}"
            yield f"{DECLARED['mamba']} --hybrid-layer-pattern {pattern}"
            yield "--position-embedding-type none"
        else:
            yield "--num-layers 4 --position-embedding-type rope"
        if "mtp" in models:
            yield "--mtp-num-layers 1"


def runs_of(layers: str, recipe: str, on_gpu: bool) -> Iterable[Run]:
    """Yield a run for each pair of features."""
    for features in PAIRS:
        yield Run(
            features, layers, recipe, on_gpu,
            in_bf16=on_gpu or "quantized-params" in features, from_seed="FSDP" in features,
        )  # fmt: skip
