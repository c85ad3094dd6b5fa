"""Mapping between Megatron-LM's tensors and Hugging Face's: their names and their rows."""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.model_arguments import is_gated
from megatron_lowbit.checkpoints.reader import EMBEDDING, TensorSlice, TensorSource
from megatron_lowbit.errors import UserError

Model = Mapping[str, Any]
"""Megatron-LM's arguments that describe a model, by their attributes' names."""
Names = Mapping[str, str]
"""Megatron-LM's keys, each with the Hugging Face tensors it is made of.

``{a,b}_proj`` are two tensors, concatenated by rows. ``*`` is the number of an expert. Consecutive
keys of one tensor are consecutive rows of it.
"""
HEAD = "output_layer.weight"
_NORMS = ("input_layernorm", "layer_norm_weight", "layer_norm_bias", "post_layernorm",
          "final_layernorm", "final_norm")  # fmt: skip
"""Tensors of norms with a number for each hidden unit."""


@dataclass(frozen=True)
class Rule:
    """Rows of Megatron-LM's ``targets`` as rows of Hugging Face's ``names``, without arithmetic.

    Attributes:
        targets: tensors of Megatron-LM, or slices of them, concatenated by rows.
        names: tensors of Hugging Face, concatenated by rows.
        target_rows: rows of each target.
        rows: output features of each of Hugging Face's tensors.
        group_rows: rows of queries, key and value in one query group of ``linear_qkv``.
        is_transposed: True if Hugging Face's tensors are stored as (in, out).
        is_padded: True if either side may have further rows, which stand for no token.
        columns: input features of a matrix; None if they are not known.
    """

    targets: tuple[TensorSlice, ...]
    names: tuple[str, ...]
    target_rows: tuple[int, ...]
    rows: tuple[int, ...]
    group_rows: tuple[int, ...] = ()
    is_transposed: bool = False
    is_padded: bool = False
    columns: int | None = None

    def to_megatron(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the targets. Raises RuntimeError where the parts do not fit."""
        if self.is_padded:
            parts = [parts[0][: self.rows[0]]]
        if self.is_transposed:
            parts = [part.t() for part in parts]
        joined = _concatenate(parts).contiguous()
        if self.group_rows:
            groups = sum(self.rows) // sum(self.group_rows)
            projections = joined.split([groups * rows for rows in self.group_rows])
            by_group = [projection.unflatten(0, (groups, -1)) for projection in projections]
            joined = torch.cat(by_group, dim=1).flatten(0, 1)
        return joined.split(self.target_rows) if len(self.targets) > 1 else [joined]

    def read(self, tensors: TensorSource) -> Tensor:
        """Read the targets, concatenated by rows."""
        return self._join([tensors.read(target) for target in self.targets])

    def outline(self, tensors: TensorSource) -> Tensor:
        """Return the tensor of :meth:`read`, on the ``meta`` device.

        Raises UserError where the shapes are not the model's.
        """
        shapes = [tensors.shape(target) for target in self.targets]
        try:
            joined = self._join([torch.empty(shape, device="meta") for shape in shapes])
            self.to_hugging_face(joined)
        except (RuntimeError, IndexError):
            targets = zip(self.targets, shapes, strict=True)
            listed = ", ".join(f"{target.key} is {list(shape)}" for target, shape in targets)
            raise UserError(
                f"{tensors.path}: {listed}, which is not the model's: {list(self.rows)} rows"
            ) from None
        return joined

    def _join(self, targets: Sequence[Tensor]) -> Tensor:
        rows = zip(targets, self.target_rows, strict=True)
        if self.is_padded:
            return _concatenate([target[:count] for target, count in rows])
        # Raises RuntimeError where there are other rows.
        return _concatenate([target.split([count])[0] for target, count in rows])

    def to_hugging_face(self, joined: Tensor) -> list[Tensor]:
        """Return Hugging Face's tensors of the concatenated targets."""
        if self.group_rows:
            by_group = joined.unflatten(0, (-1, sum(self.group_rows)))
            projections = by_group.split(self.group_rows, dim=1)
            joined = torch.cat([projection.flatten(0, 1) for projection in projections])
        parts = joined.split(self.rows)
        return [part.t() if self.is_transposed else part for part in parts]


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def biases(weights: Names) -> dict[str, str]:
    """Return the biases of modules, by the names of their weights."""
    return {
        key.replace("weight", "bias"): name.replace("weight", "bias")
        for key, name in weights.items()
    }


def expand(
    outer: Names,
    layers: Names | Sequence[Names],
    model: Model,
    prefix: str,
    blocks: int,
    is_transposed: bool,
) -> list[Rule]:
    """Return the rules of all tensors of a model, layer by layer.

    The arguments are attributes of a family. ``layers`` is one mapping where all layers are alike,
    whose tensors Megatron-LM stacks, or else a mapping for each layer.
    """
    lines = [(TensorSlice(key), names) for key, names in outer.items()]
    lines += _layer_lines(layers, model, prefix, blocks)
    lines = [(target, names) for target, names in lines if _has(model, target.key)]
    sizes, rules = _sizes(model), []
    for pattern, line in groupby(lines, key=lambda line: line[1]):
        targets, names = tuple(target for target, _ in line), _alternatives(pattern)
        key = targets[0].key
        target_rows = tuple(sizes[_module(target.key, sizes)][0] for target in targets)
        rows = (sum(target_rows) // len(names),) * len(names)
        group_rows: tuple[int, ...] = ()
        if key.endswith((".linear_qkv.weight", ".linear_qkv.bias")):
            groups, dimension = model["num_query_groups"], model["kv_channels"]
            queries = model["num_attention_heads"] // groups * dimension
            group_rows = (queries, dimension, dimension)
            # One tensor where Hugging Face has their concatenation.
            rows = tuple(groups * part for part in group_rows) if len(names) > 1 else rows
        is_linear = "linear_" in key and key.endswith(".weight")
        is_padded = key in (EMBEDDING, HEAD)
        rules.append(
            Rule(targets, names, target_rows, rows, group_rows, is_transposed and is_linear,
                 is_padded, sizes[_module(key, sizes)][1])
        )  # fmt: skip
    return rules


def _has(model: Model, key: str) -> bool:
    """Return False for a tensor of an optional feature that a model does not use."""
    if key == HEAD:
        return bool(model["untie_embeddings_and_output_weights"])
    if ".linear_q_" in key:
        return ("linear_q_proj" in key) == (model.get("q_lora_rank") is None)
    if "linear_" in key and key.endswith(".bias"):
        with_qkv = "linear_qkv" in key and model.get("add_qkv_bias")
        return bool(model["add_bias_linear"] or with_qkv)
    is_norm = key.endswith(
        ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
    )
    return not is_norm or bool(model.get("qk_layernorm"))


def _layer_lines(
    layers: Names | Sequence[Names], model: Model, prefix: str, blocks: int
) -> Iterator[tuple[TensorSlice, str]]:
    """Yield the tensors of all layers, and the pattern of the names that each is made of."""
    count, experts = model["num_layers"], model.get("num_experts", 0)
    alike = isinstance(layers, Mapping)
    each: Sequence[Names] = [layers] * count if isinstance(layers, Mapping) else layers
    for layer, tensors in enumerate(each):
        start = "decoder.layers." if alike else f"decoder.layers.{layer}."
        index, length = ((layer,), (count,)) if alike else ((), ())
        for key, names in tensors.items():
            of_experts = "*" in key
            for expert in range(experts) if of_experts else [0]:
                axes = ((*index, expert), (*length, experts)) if of_experts else (index, length)
                target = TensorSlice(start + key.replace(".*", ""), *axes)
                yield target, f"{prefix}.{layer // blocks}.{names}".replace("*", str(expert))


def _alternatives(pattern: str) -> tuple[str, ...]:
    """Return the names that a pattern such as ``{q,k,v}_proj.weight`` stands for."""
    start, _, rest = pattern.partition("{")
    names, _, end = rest.partition("}")
    return tuple(f"{start}{name}{end}" for name in names.split(","))


def _module(key: str, listed: Container[str]) -> str:
    """Return the name of a tensor's module or parameter, with its parent if listed so."""
    names = key.removesuffix(".weight").removesuffix(".bias").split(".")
    both = ".".join(names[-2:])
    return both if both in listed else names[-1]


def mamba_heads(model: Model) -> int:
    """Return the number of heads, counted as megatron-core does where no argument says it."""
    return int(model["mamba_num_heads"] or 2 * model["hidden_size"] // model["mamba_head_dim"])


def _sizes(model: Model) -> dict[str, tuple[int, int | None]]:
    """Return rows and columns of Megatron-LM's tensors by their names in :func:`_module`.

    Columns are None where they are not checked.
    """
    size = defaultdict(int, model)  # 0 for what the model does not have
    hidden, vocabulary = size["hidden_size"], size["vocab_size"]
    heads, groups, channels = (
        size[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels")
    )
    fc1 = 2 if is_gated(model) else 1  # gate and up together, or only up
    dense, routed = size["ffn_hidden_size"], size["moe_ffn_hidden_size"]
    shared, experts = size["moe_shared_expert_intermediate_size"], size["num_experts"]
    queries, latents, rotated = (
        size[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim")
    )
    mamba = mamba_heads(model) if "mamba_head_dim" in model else 0
    inner = mamba * size["mamba_head_dim"]
    states = size["mamba_num_groups"] * size["mamba_state_dim"]
    return {
        **dict.fromkeys(_NORMS, (hidden, None)),
        "word_embeddings": (vocabulary, hidden),
        "output_layer": (vocabulary, hidden),
        "position_embeddings": (size["max_position_embeddings"], hidden),
        "linear_qkv": ((heads + 2 * groups) * channels, hidden),
        "linear_proj": (hidden, heads * channels),
        "q_layernorm": (channels, None),
        "k_layernorm": (channels, None),
        "softmax_offset": (heads, None),
        "linear_fc1": (fc1 * dense, hidden),
        "linear_fc2": (hidden, dense),
        "experts.linear_fc1": (fc1 * routed, hidden),
        "experts.linear_fc2": (hidden, routed),
        "shared_experts.linear_fc1": (fc1 * shared, hidden),
        "shared_experts.linear_fc2": (hidden, shared),
        "router": (experts, hidden),
        "gate_weight": (1, None),
        "expert_bias": (experts, None),
        # Multi-latent attention.
        "linear_q_proj": (heads * (size["qk_head_dim"] + rotated), hidden),
        "linear_q_down_proj": (queries, hidden),
        "linear_q_up_proj.layer_norm_weight": (queries, None),
        "linear_q_up_proj": (heads * (size["qk_head_dim"] + rotated), queries),
        "linear_kv_down_proj": (latents + rotated, hidden),
        "linear_kv_up_proj.layer_norm_weight": (latents, None),
        "linear_kv_up_proj": (heads * (size["qk_head_dim"] + size["v_head_dim"]), latents),
        # Mamba-2 blocks.
        "out_proj": (hidden, None),
        **dict.fromkeys(("z", "x", "norm"), (inner, None)),
        **dict.fromkeys("BC", (states, None)),
        **dict.fromkeys(("dt", "A_log", "D", "dt_bias"), (mamba, None)),
    }
