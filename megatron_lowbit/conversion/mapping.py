"""Mapping between Megatron-LM's tensors and Hugging Face's, and the transform of each tensor."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.model_arguments import is_gated
from megatron_lowbit.checkpoints.reader import EMBEDDING, TensorSlice

Model = Mapping[str, Any]
"""Megatron-LM's arguments that describe a model, by their attributes' names."""
HEAD = "output_layer.weight"
_HIDDEN_ROWS = ("input_layernorm", "layer_norm_weight", "layer_norm_bias", "post_layernorm",
                "final_layernorm", "final_norm", "linear_proj", "linear_fc2",
                "out_proj")  # fmt: skip
"""Tensors with a row for each hidden unit."""


class TensorTable(NamedTuple):
    """Tensors of a model: Megatron-LM's keys, each with the Hugging Face tensors it is made of.

    ``{a,b}_proj`` are two tensors, concatenated by rows. ``*`` is the number of an expert.
    Consecutive keys of one tensor are consecutive rows of it.

    Attributes:
        before: tensors before the layers.
        layers: tensors of a layer, without the start of their names; one mapping where all layers
            are alike, whose tensors Megatron-LM stacks, or else a mapping for each layer.
        after: tensors behind the layers.
        prefix: start of Hugging Face's names before the number of a layer.
    """

    before: Mapping[str, str]
    layers: Mapping[str, str] | Sequence[Mapping[str, str]]
    after: Mapping[str, str]
    prefix: str = "model.layers"


@dataclass(frozen=True)
class TensorTransform:
    """Exact, invertible transform of Hugging Face's tensors into one of Megatron-LM's.

    Attributes:
        rows: output features of each of Hugging Face's tensors.
        is_transposed: whether these are stored as (in, out).
        group_rows: rows of queries, key and value in one query group of ``linear_qkv``.
        share: first and last row of what Megatron-LM's tensor takes; None for all rows.
        is_padded: whether either side may have further rows, which stand for no token.
    """

    rows: tuple[int, ...]
    is_transposed: bool = False
    group_rows: tuple[int, ...] = ()
    share: tuple[int, int] | None = None
    is_padded: bool = False

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        """Return Megatron-LM's tensor. Raises RuntimeError where the parts do not fit."""
        if self.is_padded:
            parts = [parts[0][: self.rows[0]]]
        if self.is_transposed:
            parts = [part.t() for part in parts]
        whole = parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))
        if self.group_rows:
            groups = sum(self.rows) // sum(self.group_rows)
            kinds = whole.split([groups * rows for rows in self.group_rows])
            by_group = [kind.unflatten(0, (groups, -1)) for kind in kinds]
            whole = torch.cat(by_group, dim=1).flatten(0, 1)
        return whole if self.share is None else whole[slice(*self.share)]

    def to_hugging_face(self, whole: Tensor) -> list[Tensor]:
        """Return Hugging Face's tensors, or a share of the only one.

        Raises RuntimeError where the tensor has other rows.
        """
        if self.share is not None:
            start, stop = self.share
            return list(whole.split([stop - start]))
        if self.is_padded:
            whole = whole[: self.rows[0]]
        if self.group_rows:
            by_group = whole.unflatten(0, (-1, sum(self.group_rows)))
            kinds = by_group.split(self.group_rows, dim=1)
            whole = torch.cat([kind.flatten(0, 1) for kind in kinds])
        parts = whole.split(list(self.rows))
        return [part.t() if self.is_transposed else part for part in parts]


class Rule(NamedTuple):
    """One of Megatron-LM's tensors, or a slice of it, as a transform of Hugging Face's ``names``.

    Rules of shares of one tensor have the same ``names`` and follow one another by rows.
    """

    target: TensorSlice
    names: tuple[str, ...]
    transform: TensorTransform


def expand(table: TensorTable, model: Model, is_transposed: bool = False) -> list[Rule]:
    """Return the rules of all tensors of a model, layer by layer.

    Args:
        table: the family's.
        model: the arguments that give sizes.
        is_transposed: whether Hugging Face stores the weights of linear layers as (in, out).
    """
    sizes, rules = _output_rows(model), []
    for names, shares in groupby(_lines(table, model), key=lambda line: line[1]):
        targets = [target for target, _ in shares]
        rows = [_rows_of(target.key, sizes) for target in targets]
        if len(targets) > 1:
            for target, share in zip(targets, pairwise(accumulate(rows, initial=0)), strict=True):
                rules.append(Rule(target, names, TensorTransform((sum(rows),), share=share)))
            continue
        [target], [total] = targets, rows
        is_linear = "linear_" in target.key and target.key.endswith(".weight")
        transform = TensorTransform(
            (total // len(names),) * len(names),
            is_transposed=is_transposed and is_linear,
            is_padded=target.key in (EMBEDDING, HEAD),
        )
        if target.key.endswith((".linear_qkv.weight", ".linear_qkv.bias")):
            transform = _query_key_value(transform, len(names), model)
        rules.append(Rule(target, names, transform))
    return rules


def _lines(table: TensorTable, model: Model) -> Iterator[tuple[TensorSlice, tuple[str, ...]]]:
    """Yield each tensor and the names that it is made of: all of the first layer, then others."""
    for outer in (table.before, table.after):
        if outer is table.after:
            yield from _layer_lines(table, model)
        for key, names in outer.items():
            if key != HEAD or model["untie_embeddings_and_output_weights"]:
                yield TensorSlice(key), _names(names)


def _layer_lines(table: TensorTable, model: Model) -> Iterator[tuple[TensorSlice, tuple[str, ...]]]:
    layers, experts = model["num_layers"], model.get("num_experts", 0)
    alike = isinstance(table.layers, Mapping)
    for layer, tensors in enumerate([table.layers] * layers if alike else table.layers):
        start = "decoder.layers." if alike else f"decoder.layers.{layer}."
        indices, counts = ((layer,), (layers,)) if alike else ((), ())
        for of_experts, group in groupby(tensors.items(), key=lambda line: "*" in line[0]):
            lines = [
                (start + key.replace(".*", ""), f"{table.prefix}.{layer}.{names}")
                for key, names in group
            ]
            if not of_experts:
                yield from ((TensorSlice(key, indices, counts), _names(n)) for key, n in lines)
                continue
            for expert in range(experts):
                for key, names in lines:
                    target = TensorSlice(key, (*indices, expert), (*counts, experts))
                    yield target, _names(names.replace("*", str(expert)))


def _names(pattern: str) -> tuple[str, ...]:
    """Return the names that a pattern such as ``{q,k,v}_proj.weight`` stands for."""
    choice = re.search(r"\{(.+)\}", pattern)
    if choice is None:
        return (pattern,)
    return tuple(pattern.replace(choice[0], name) for name in choice[1].split(","))


def _query_key_value(transform: TensorTransform, names: int, model: Model) -> TensorTransform:
    """Return the transform of ``linear_qkv``, made of three tensors or of their concatenation."""
    groups, dimension = model["num_query_groups"], model["kv_channels"]
    group_rows = (model["num_attention_heads"] // groups * dimension, dimension, dimension)
    rows = tuple(groups * rows for rows in group_rows) if names > 1 else transform.rows
    return TensorTransform(rows, transform.is_transposed, group_rows)


def _rows_of(key: str, sizes: Mapping[str, int]) -> int:
    """Return a tensor's rows by its module or parameter, and where that says it by its parent."""
    names = key.removesuffix(".weight").removesuffix(".bias").split(".")
    both = ".".join(names[-2:])
    return sizes[both if both in sizes else names[-1]]


def mamba_heads(model: Model) -> int:
    """Return the number of heads, counted as megatron-core does where no argument says it."""
    return model["mamba_num_heads"] or 2 * model["hidden_size"] // model["mamba_head_dim"]


def _output_rows(model: Model) -> dict[str, int]:
    """Return the rows of Megatron-LM's tensors by their names in :func:`_rows_of`."""
    hidden, vocabulary = model["hidden_size"], model["vocab_size"]
    heads = model["num_attention_heads"] + 2 * model["num_query_groups"]
    rows = dict.fromkeys(_HIDDEN_ROWS, hidden) | {
        "word_embeddings": vocabulary,
        "output_layer": vocabulary,
        "position_embeddings": model["max_position_embeddings"],
        "linear_qkv": heads * model["kv_channels"],
        "q_layernorm": model["kv_channels"],
        "k_layernorm": model["kv_channels"],
        "softmax_offset": model["num_attention_heads"],
        **_mlp_rows(model),
    }
    if "multi_latent_attention" in model:
        rows |= _latent_attention_rows(model)
    if "mamba_head_dim" in model:
        heads = mamba_heads(model)
        inner = heads * model["mamba_head_dim"]
        states = model["mamba_num_groups"] * model["mamba_state_dim"]
        rows |= {"z": inner, "x": inner, "B": states, "C": states, "norm": inner}
        rows |= dict.fromkeys(("dt", "A_log", "D", "dt_bias"), heads)
    return rows


def _mlp_rows(model: Model) -> dict[str, int]:
    """Return the rows of a router, and of gate and up together or of up alone in each MLP."""
    kinds = {
        "linear_fc1": model["ffn_hidden_size"],
        "experts.linear_fc1": model.get("moe_ffn_hidden_size", 0),
        "shared_experts.linear_fc1": model.get("moe_shared_expert_intermediate_size", 0),
    }
    experts = model.get("num_experts", 0)
    rows = {name: (2 if is_gated(model) else 1) * width for name, width in kinds.items()}
    return rows | {"router": experts, "expert_bias": experts}


def _latent_attention_rows(model: Model) -> dict[str, int]:
    """Return the rows of the projections of multi-latent attention, and of their norms."""
    heads, plain, rotary = (
        model[name] for name in ("num_attention_heads", "qk_head_dim", "qk_pos_emb_head_dim")
    )
    query_rank, rank = model["q_lora_rank"], model["kv_lora_rank"]
    return {
        "linear_q_down_proj": query_rank,
        "linear_q_up_proj": heads * (plain + rotary),
        "linear_q_up_proj.layer_norm_weight": query_rank,
        "linear_kv_down_proj": rank + rotary,
        "linear_kv_up_proj": heads * (plain + model["v_head_dim"]),
        "linear_kv_up_proj.layer_norm_weight": rank,
    }
