"""Megatron-LM's arguments that describe a model: read from a checkpoint, written to files.

Everywhere in this package a model is a dictionary of these arguments by their attributes' names.
Arguments of features that a model does not use, such as experts, are omitted.
"""

import reprlib
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

MOST_LAYERS = 2**10
MOST_EXPERTS = 2**17
"""The most experts that all layers have together."""

_ALWAYS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "swiglu",
    "squared_relu", "normalization", "layernorm_epsilon", "add_bias_linear",
    "position_embedding_type", "max_position_embeddings", "untie_embeddings_and_output_weights",
)  # fmt: skip
_ROPE = ("rotary_base", "rotary_percent")
_YARN = {
    "rotary_scaling_factor": 1.0, "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True,
    "mscale": 1.0, "mscale_all_dim": 0.0,
}  # fmt: skip
"""Arguments of ``--position-embedding-type yarn`` and megatron-core's defaults."""
_POSITIONS = {"rope": _ROPE, "yarn": (*_ROPE, *_YARN)}
"""Arguments by the type of position embeddings."""
_OPTIONAL: tuple[dict[str, Any], ...] = (
    {"num_experts": None, "moe_router_topk": ..., "moe_ffn_hidden_size": ...,
     "moe_layer_freq": ..., "moe_router_pre_softmax": ..., "moe_router_score_function": "softmax",
     "moe_router_enable_expert_bias": False, "moe_router_num_groups": None,
     "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None,
     "moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False},
    {"hybrid_layer_pattern": None, "mamba_state_dim": ..., "mamba_head_dim": ...,
     "mamba_num_groups": ..., "mamba_num_heads": ...},
    {"multi_latent_attention": False, "q_lora_rank": None, "kv_lora_rank": ...,
     "qk_head_dim": ..., "qk_pos_emb_head_dim": ..., "v_head_dim": ..., "rope_type": ...,
     "rotary_scaling_factor": ..., "mscale": ..., "mscale_all_dim": ...},
    {"use_rope_scaling": ..., "rope_scaling_factor": ...},
    {"add_qkv_bias": False}, {"no_rope_freq": None}, {"rotary_interleaved": False},
    {"qk_layernorm": False}, {"layernorm_zero_centered_gamma": False}, {"geglu": False},
    {"sandwich_norm": False}, {"residual_multiplier": 1.0},
    {"rotary_seq_len_interpolation_factor": None},
    {"use_mup": False, "mup_embedding_mult": ..., "mup_output_mult": 1.0,
     "mup_attn_scale_power": ..., "mup_base_head_dim": ...},
    {"softmax_type": "vanilla"},
    {"window_size": None, "window_attn_skip_freq": None, "window_rotary_base": None},
    {"quick_geglu": False}, {"glu_linear_offset": 0.0}, {"activation_func_clamp_value": None},
)  # fmt: skip
"""Arguments of features that a model has if the first argument of a row is set.

Each value is the argument's in a model without the feature; ``...`` if it has none there.
"""
FEATURES = {name: usual for row in _OPTIONAL for name, usual in row.items() if usual is not ...}
"""Arguments of features that some families have, and their values in the others' models.

A model without such a feature has no such argument.
"""
_PLACE = "the checkpoint's arguments"
_SIZES = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "vocab_size",
    "max_position_embeddings", "num_query_groups", "moe_router_topk", "moe_ffn_hidden_size",
    "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_router_num_groups",
    "moe_router_group_topk", "moe_shared_expert_intermediate_size",
    "yarn_original_max_position_embeddings",
)  # fmt: skip
_POSITIVE = (
    "layernorm_epsilon", "rotary_base", "rotary_percent", "rope_scaling_factor",
    "rotary_scaling_factor", "moe_router_topk_scaling_factor", "yarn_beta_fast",
    "yarn_beta_slow", "activation_func_clamp_value",
)  # fmt: skip
_FINITE = ("mscale", "mscale_all_dim", "glu_linear_offset")

_UNCONVERTED: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    "mtp_num_layers": None,
    "qk_l2_norm": False,
}
"""Arguments that change what a model computes, and the only values that converted models have."""


def model_of(args: Namespace, vocab_size: int) -> dict[str, Any]:
    """Return the model's arguments among a run's, as a checkpoint has them.

    ``vocab_size``: rows of the vocabulary that stand for tokens. Raises UserError for a model with
    a feature that no family has.
    """
    arguments = vars(args)
    for name, value in _UNCONVERTED.items():
        if arguments.get(name, value) != value:
            raise UserError(f"the model has {name} {arguments[name]!r}; conversion knows {value!r}")
    model: dict[str, Any] = {name: arguments.get(name) for name in _ALWAYS}
    grouped = arguments.get("group_query_attention")
    model["num_query_groups"] = arguments.get(
        "num_query_groups" if grouped else "num_attention_heads"
    )
    model["vocab_size"] = vocab_size
    model |= {name: arguments.get(name) for name in _optional(arguments)}
    if not (is_gated(model) or model["squared_relu"]):
        # Megatron-LM's fused kernel computes the approximation by tanh.
        model["openai_gelu"] = bool(
            arguments.get("openai_gelu") or arguments.get("bias_gelu_fusion")
        )
    if "num_experts" in model:
        model["moe_ffn_hidden_size"] = model["moe_ffn_hidden_size"] or model["ffn_hidden_size"]
    if model["position_embedding_type"] == "yarn":
        model |= {name: usual for name, usual in _YARN.items() if model[name] is None}
    if "multi_latent_attention" in model:
        model["rope_type"] = model["rope_type"] or "yarn"  # megatron-core's default
    if "hybrid_layer_pattern" in model:
        # Bars only say where a pipeline is cut.
        pattern = Entries(arguments, _PLACE).string("hybrid_layer_pattern")
        model["hybrid_layer_pattern"] = pattern.replace("|", "")
    _check_numbers(model)
    if "use_mup" in model and "mup_output_mult" not in model:
        hidden = model["hidden_size"]
        base = Entries(arguments, _PLACE).integer("mup_base_hidden_size", hidden)
        if base != hidden:
            model["mup_output_mult"] = base / hidden  # megatron-core's default
    if "num_experts" in model:
        layers = _pattern(model, "moe_layer_freq", lambda layer, n: layer % n == 0)
        # Checkpoints hold a tensor of all layers with experts, or else one for each layer.
        model["moe_layer_freq"] = 1 if model["moe_layer_freq"] == 1 else layers
    if "no_rope_freq" in model:
        name = "no_rope_freq"
        model[name] = _pattern(model, name, lambda layer, n: (layer + 1) % n == 0)
    if "window_size" in model:
        name = "window_attn_skip_freq"
        model[name] = (
            [1] * model["num_layers"]
            if model.get(name) is None
            else _pattern(model, name, lambda layer, n: (layer + 1) % n != 0)
        )
    return model


def is_gated(model: Mapping[str, Any]) -> bool:
    """Return True if the first linear layer of an MLP computes a gate, too."""
    return bool(model["swiglu"] or model.get("quick_geglu") or model.get("geglu"))


def _optional(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments of the features that a run's model has."""
    names = [name for row in _OPTIONAL if arguments.get(next(iter(row))) for name in row]
    for name, usual in FEATURES.items():
        if name in names and arguments.get(name, usual) == usual:
            names.remove(name)
    if arguments.get("add_bias_linear") and "add_qkv_bias" in names:
        names.remove("add_qkv_bias")  # It follows from the other.
    positions = Entries(arguments, _PLACE).string("position_embedding_type", "")
    return [*_POSITIONS.get(positions, ()), *names]


def _pattern(
    model: Mapping[str, Any], name: str, is_chosen: Callable[[int, int], bool]
) -> list[int]:
    """Return an argument that chooses layers, by a list or a number, as 1 or 0 for each layer."""
    pattern, layers = model[name], model["num_layers"]
    if type(pattern) is int and pattern >= 1:
        return [int(is_chosen(layer, pattern)) for layer in range(layers)]
    is_list = isinstance(pattern, list) and len(pattern) == layers
    require(
        is_list and all(type(entry) is int and 0 <= entry <= 1 for entry in pattern),
        f"{_PLACE}: {name} {reprlib.repr(pattern)}: must be a number of layers, or 0 or 1 for each "
        "layer",
    )
    return list(pattern)


def _check_numbers(model: dict[str, Any]) -> None:
    """Raise UserError where one is of another type, or too large for a model."""
    entries = Entries(model, _PLACE)
    layers = entries.integer("num_layers", maximum=MOST_LAYERS)
    for name in filter(model.__contains__, _SIZES):
        entries.integer(name)
    for name in filter(model.__contains__, _POSITIVE):
        entries.number(name, above=0)
    for name in filter(model.__contains__, _FINITE):
        entries.number(name)
    if "num_experts" in model:
        entries.integer("num_experts", maximum=MOST_EXPERTS // layers)
    if "multi_latent_attention" in model:
        entries.string("rope_type")
    if "mamba_num_heads" in model:
        entries.integer("mamba_num_heads", 0, minimum=0)
    if "window_size" in model:
        window = model["window_size"]
        is_pair = isinstance(window, tuple) and [type(tokens) for tokens in window] == [int, int]
        message = f"{_PLACE}: window_size {reprlib.repr(window)}: must be a pair of integers"
        require(is_pair, message)


def described_by(args: Namespace) -> dict[str, Any]:
    """Return the arguments of a run that say what its model computes, for a model of any kind."""
    arguments = vars(args)
    names = [*_ALWAYS, "num_query_groups", "group_query_attention", "vocab_size"]
    names += _optional(arguments)
    names += [name for name, usual in _UNCONVERTED.items() if arguments.get(name, usual) != usual]
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def saved_arguments(model: Mapping[str, Any]) -> Namespace:
    """Return the ``args`` of a converted model's checkpoint.

    Megatron-LM compares some of these with a run's arguments, takes others over with
    ``--use-checkpoint-args``, and looks for optimizer and random states unless they say that none
    were saved.
    """
    return Namespace(
        **model,
        group_query_attention=model["num_query_groups"] != model["num_attention_heads"],
        padded_vocab_size=model["vocab_size"],
        make_vocab_size_divisible_by=1,
        add_position_embedding=True,
        tokenizer_type=None,  # So that --use-checkpoint-args leaves a run its own.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
        precision_recipe=None,
        recipe_set=[],
    )


_FLAGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
}


def argument_file(family: str, model: Mapping[str, Any]) -> str:
    """Return the arguments that build a family's model, as the text of an ``@FILE``."""
    model = dict(model)
    lines = [f"# {family}, converted from Hugging Face"]
    if not model.pop("add_bias_linear"):
        lines.append("--disable-bias-linear")
    elif "num_experts" in model:
        lines.append("--expert-tensor-parallel-size 1")  # Megatron-LM splits no expert with biases.
    if "hybrid_layer_pattern" in model:
        del model["num_layers"]  # The pattern says it.
    if model.get("openai_gelu") is False:
        lines.append("--no-bias-gelu-fusion")
    if model.get("yarn_correction_range_round_to_int") is False:
        lines.append("--no-yarn-correction-range-round-to-int")
    if model.get("rope_type") == "rope":
        lines.append("--no-rope-fusion")  # Latent attention fuses YaRN only.
    if "multi_latent_attention" in model and not model.get("q_lora_rank"):
        lines.append("--transformer-impl local")  # Others normalize the input of queries twice.
    groups = model.pop("num_query_groups")
    if groups != model["num_attention_heads"]:
        lines.append(f"--group-query-attention --num-query-groups {groups}")
    for name, value in model.items():
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        if value is True:
            lines.append(flag)
        elif isinstance(value, list):  # Megatron-LM reads patterns of layers without spaces.
            lines.append(f"{flag}=[{','.join(map(str, value))}]")
        elif isinstance(value, tuple):
            lines.append(f"{flag}={','.join(map(str, value))}")
        elif value is not None and value is not False:
            # Joined, since a hybrid's pattern may begin with "-".
            lines.append(shlex.quote(f"{flag}={value}"))
    lines += [
        "# A multiple of the tensor-parallel size; more rows than tokens are allowed.",
        f"--padded-vocab-size {model['vocab_size']}",
        "--hidden-dropout 0.0 --attention-dropout 0.0",
    ]
    return "\n".join(lines) + "\n"
