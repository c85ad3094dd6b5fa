"""Mixtral: a Llama whose MLPs are experts, the best two or so for each token."""

from typing import Any

from megatron_lowbit.conversion import llama
from megatron_lowbit.conversion.plan import MOST_EXPERTS, Family, Place, Rule, check_model
from megatron_lowbit.conversion.tensor_transforms import Join
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries

ARCHITECTURE = "MixtralForCausalLM"


def from_config(config: dict[str, Any]) -> Family:
    """Return the family member that a config.json describes.

    Raises UserError for what this project's model cannot do.
    """
    if config.get("sliding_window") is not None:
        raise UserError("config.json: sliding_window: this project's attention has no window")
    entries = Entries(config, "config.json")
    model = llama.model_of(config)
    experts = entries.integer("num_local_experts", most=MOST_EXPERTS // model["num_layers"])
    model |= {
        "num_experts": experts,
        "moe_router_topk": entries.integer("num_experts_per_tok", most=experts),
        "moe_ffn_hidden_size": model["ffn_hidden_size"],
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
    }
    return Family("Mixtral", model, config, rules(model))


def claims(model: dict[str, Any]) -> bool:
    """Return whether a model can only be of this family."""
    return "num_experts" in model


def to_config(model: dict[str, Any]) -> dict[str, Any]:
    """Build a config.json for a trained model of this kind.

    Raises UserError where the model is no Mixtral.
    """
    wanted = {"moe_layer_freq": 1, "moe_router_pre_softmax": False}
    check_model(model, "a Mixtral", wanted)
    return llama.to_config(model) | {
        "architectures": [ARCHITECTURE],
        "model_type": "mixtral",
        "intermediate_size": model["moe_ffn_hidden_size"],
        "num_local_experts": model["num_experts"],
        "num_experts_per_tok": model["moe_router_topk"],
        "sliding_window": None,
    }


def rules(model: dict[str, Any]) -> list[Rule]:
    """Return the rules of all the model's tensors."""
    experts, wide = model["num_experts"], model["moe_ffn_hidden_size"]

    def mlp(layer: int) -> dict[Place, tuple[tuple[str, ...], Join]]:
        theirs = f"model.layers.{layer}.block_sparse_moe"
        found = {
            llama.in_layer("mlp.router.weight", model, layer): (
                (f"{theirs}.gate.weight",), Join((experts,)),
            ),
        }  # fmt: skip
        for expert in range(experts):
            w1, w2, w3 = (f"{theirs}.experts.{expert}.w{number}.weight" for number in (1, 2, 3))
            index, of = (layer, expert), (model["num_layers"], experts)
            ours = "decoder.layers.mlp.experts.experts"
            found[Place(f"{ours}.linear_fc1.weight", index, of)] = (w1, w3), Join((wide, wide))
            found[Place(f"{ours}.linear_fc2.weight", index, of)] = (
                (w2,), Join((model["hidden_size"],)),
            )  # fmt: skip
        return found

    return llama.rules(model, mlp)
