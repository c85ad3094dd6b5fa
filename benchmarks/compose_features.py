"""Features that composition is examined for: arguments, ranks, models, references and bounds."""

import math
from collections.abc import Iterable, Mapping
from itertools import combinations_with_replacement
from pathlib import Path
from typing import NamedTuple

import yaml
from parity import FLIPS, LARGE_FLIPS, OTHER, SUMS, WHOLE, Bounds

from megatron_lowbit.recipes.load import read_recipe

# 2 tensor-parallel ranks hold whole blocks of 128 of every weight. Under sequence parallelism each
# has 64 tokens: whole blocks of NVFP4, whose codes are gathered, but half a tile of FP8. Nothing is
# clipped, and epsilon is larger than most gradients: Adam's first update divides a gradient by
# itself, and a sum in another order would turn signs around.
MODEL = """
    --hidden-size 256 --ffn-hidden-size 256 --num-attention-heads 4 --swiglu
    --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
    --untie-embeddings-and-output-weights --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --clip-grad 1e6 --adam-eps 1e-3
    --lr-decay-iters 100 --override-opt-param-scheduler --log-interval 1 --eval-iters 0
    --eval-interval 1000 --num-workers 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 500
"""
GROUPED = "--group-query-attention --num-query-groups 2"
LATENT = """
    --multi-latent-attention --q-lora-rank 256 --kv-lora-rank 192 --qk-head-dim 64
    --qk-pos-emb-head-dim 64 --v-head-dim 64
"""
EXPERTS = (
    "--num-experts 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32"
)
MAMBA = "--mamba-state-dim 32 --mamba-head-dim 32 --mamba-num-groups 4"
GPU = "--bf16 --no-gradient-accumulation-fusion"
LAYERS = {
    "local": "--transformer-impl local --no-persist-layer-norm --no-rope-fusion "
    "--no-masked-softmax-fusion",
    "te": "--transformer-impl transformer_engine",
}
"""Arguments of each kind of layers on a GPU; a CPU has local layers and needs none."""

DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


class Feature(NamedTuple):
    """A feature of a run.

    Attributes:
        options: its arguments.
        sizes: parallel sizes that it sets, by dimension: tp, pp, cp, dp, ep, etp.
        model: part of the model, or of its recipe, that it changes; the reference has it, too.
        gpu: why it needs a GPU.
        saves: True if the run is resumed from a checkpoint that it has saved.
        partner: True if it is compared with the distributed optimizer on the same ranks.
    """

    options: str = ""
    sizes: Mapping[str, int] = {}
    model: str = ""
    gpu: str = ""
    saves: bool = False
    partner: bool = False


TP, PP, CP, DP = ({name: 2} for name in ("tp", "pp", "cp", "dp"))
FEATURES = {
    "TP2": Feature("--tensor-model-parallel-size 2", TP),
    "SP": Feature("--tensor-model-parallel-size 2 --sequence-parallel", TP),
    "PP2": Feature("--pipeline-model-parallel-size 2", PP),
    "VPP": Feature("--pipeline-model-parallel-size 2", PP),
    "CP2": Feature("--context-parallel-size 2", CP),
    "EP2": Feature("--expert-model-parallel-size 2", {"ep": 2}, "experts"),
    "ETP2": Feature("--expert-tensor-parallel-size 2", {"etp": 2}, "experts"),
    "DP2": Feature(DISTRIBUTED, DP),
    "FSDP": Feature(
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --use-distributed-optimizer",
        DP, gpu="Megatron-FSDP", partner=True,
    ),
    "graphs": Feature(gpu="CUDA graphs"),
    "recompute-full": Feature(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "recompute-selective": Feature("--recompute-granularity selective"),
    "async-save": Feature(
        "--async-save --async-strategy mcore --use-persistent-ckpt-worker",
        gpu="the persistent checkpoint worker", saves=True,
    ),
    "resume": Feature(saves=True),
    "delayed": Feature(model="delayed"),
    "switch": Feature(model="switch"),
    "MoE": Feature(model="experts"),
    "hybrid": Feature(model="hybrid"),
    "MLA": Feature(model="latent"),
    "MTP": Feature(model="mtp"),
    "quantized-params": Feature(
        f"{DISTRIBUTED} --quantized-param-gather --bf16", DP, partner=True
    ),
}  # fmt: skip
RECIPES = ("bf16", "fp8-tile", "nvfp4")
PAIRS = [*combinations_with_replacement(FEATURES, 2)]
"""All pairs of features; a feature with itself is the feature alone."""

# Under nvfp4 moving one process's own norm weights by 1e-7 moves the second loss by up to 1.7e-3
# and the first gradient norm by up to 1e-3, with MTP by up to 9e-4 and 2.7e-3 (12 draws each).
AMPLIFIED = Bounds(2e-3, 5e-3)
# BF16 activations are rounded after other partial sums: 2^-9 of an element.
BF16_SUMS = Bounds(5e-4, 1e-2)
# Under recipes two ranks' partial sums in BF16 move the second loss by up to 5e-4 (fp8-tile) and
# 1.4e-3 (nvfp4), and the first gradient norm by up to 3.4e-3 and 1.1e-2: TP2 with MTP and without,
# SP with experts, 6 seeds each, on a CPU.
BF16_SPLIT = Bounds(4e-3, 3e-2)
# Under nvfp4 some models' second loss moves much farther than most: TP2 with MTP by a median of
# 4.5e-4 and at most 4.8e-3, ETP2 with MLA by 2.1e-3 and 3.9e-3, norms by up to 1.9e-2 (24 seeds
# each, on a CPU with BF16 weights).
BF16_AMPLIFIED = Bounds(1e-2, 3e-2)
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
        seed: of random weights and mock data; None for Megatron-LM's default.
    """

    features: tuple[str, ...]
    layers: str
    recipe: str
    on_gpu: bool
    in_bf16: bool = False
    from_seed: bool = False
    seed: int | None = None

    @property
    def key(self) -> str:
        """Name that no other run has."""
        extra = [name for name in ("in_bf16", "from_seed") if getattr(self, name)]
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
    def architecture(self) -> tuple[str, ...]:
        """Changes of the model alone: runs with the same ones share a start."""
        return tuple(sorted(self.models - {"delayed", "switch"}))

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
        if any(FEATURES[name].partner for name in self.features):
            others = {name for name in self.features if not FEATURES[name].partner}
            kept = others - {"resume", "async-save", "recompute-full", "recompute-selective",
                             "graphs"} | {"DP2"}  # fmt: skip
        else:
            kept = {name for name in ("delayed", "switch", "MoE", "hybrid", "MLA", "MTP")
                    if FEATURES[name].model in self.models}  # fmt: skip
        return self._replace(features=tuple(name for name in FEATURES if name in kept))

    def start(self) -> "Run":
        """Return the run of one process whose weights it starts from."""
        kept = {"MoE": "experts", "hybrid": "hybrid", "MLA": "latent", "MTP": "mtp"}
        features = tuple(name for name, part in kept.items() if part in self.architecture)
        return Run(features, self.layers, "bf16", self.on_gpu, seed=self.seed)

    def bounds(self) -> Bounds:
        """Return the largest differences from its reference that count as parity."""
        names = set(self.features)
        quantized = self.recipe != "bf16" or names & {"delayed", "switch"}
        floor = BF16_SUMS if self.on_gpu else Bounds(5e-5, 1e-3) if self.in_bf16 else Bounds(0, 0)
        if not quantized:
            found = SUMS
        elif names & SPREAD and self.on_gpu:
            wide = self.recipe == "nvfp4" and names & {"MTP", "MLA"}
            found = BF16_AMPLIFIED if wide else BF16_SPLIT
        elif names & {"EP2", "ETP2", "CP2"} or (names & {"TP2", "SP"} and "hybrid" in names):
            found = OTHER
        elif names & {"TP2", "SP"}:
            tile = LARGE_FLIPS if names & {"delayed", "switch"} else FLIPS
            found = AMPLIFIED if self.recipe == "nvfp4" else tile
        else:
            found = WHOLE
        return Bounds(*map(max, found, floor))

    def arguments(self, recipe_file: Path) -> list[str]:
        """Return its command line, but for its length and folders."""
        words = [MODEL, *self._model()]
        words += [FEATURES[name].options for name in self.features]
        if self.in_bf16:
            words.append("--bf16")
        if self.seed is not None:
            words.append(f"--seed {self.seed}")
        if "EP2" in self.features and "ETP2" not in self.features:
            words.append("--expert-tensor-parallel-size 1")
        if "VPP" in self.features and "hybrid" not in self.models:
            words.append("--num-layers-per-virtual-pipeline-stage 1")
        if "graphs" in self.features:
            implementation = "local" if self.layers == "te" else "transformer_engine"
            words.append(f"--cuda-graph-impl {implementation} --cuda-graph-warmup-steps 1")
        if self.on_gpu:
            # Sums in one order; TE splits sequences over ranks in its other implementations only.
            backend = "auto" if "CP2" in self.features else "unfused"
            words.append(f"--attention-backend {backend}")
        words.append(f"{GPU} {LAYERS[self.layers]}" if self.on_gpu
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
        attention = LATENT if "latent" in models else GROUPED
        yield attention
        yield EXPERTS if "experts" in models else ""
        if "hybrid" in models:
            blocks = [
                "M",
                "E" if "experts" in models else "-",
                "+" if "latent" in models else "*",
                "E" if "experts" in models else "-",
            ]
            pattern = ("|" if "VPP" in self.features else "").join(blocks)
            if "mtp" in models:
                pattern += f"/{blocks[2]}{blocks[3]}"
            yield f"{MAMBA} --hybrid-layer-pattern {pattern} --position-embedding-type none"
        else:
            yield "--num-layers 4 --position-embedding-type rope"
        if "mtp" in models:
            yield "--mtp-num-layers 1"


def runs_of(layers: str, recipe: str, on_gpu: bool) -> Iterable[Run]:
    """Yield a run for each pair of features."""
    for pair in PAIRS:
        features = tuple(name for name in FEATURES if name in pair)
        yield Run(
            features, layers, recipe, on_gpu,
            in_bf16=on_gpu or "quantized-params" in features, from_seed="FSDP" in features,
        )  # fmt: skip
