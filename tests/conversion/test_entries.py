"""Each entry of config.json that changes transformers' logits is read or refused."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from tiny_models import LINEAR, LLAMA3, MODELS, ROPE, TOKENS, entries_of, make_model

from megatron_lowbit.conversion.families import from_config
from megatron_lowbit.errors import UserError
from tests.marks import others_slow

WINDOWS = ["sliding_attention", "full_attention"] * 2
OTHERS = {
    "attention_bias": [True], "attn_logit_softcapping": [1.0], "embedding_multiplier": [3.0],
    "final_logit_softcapping": [1.0], "head_dim": [8], "hidden_act": ["gelu", "relu"],
    "is_causal": [False], "layer_types": [WINDOWS], "logits_scaling": [3.0], "mlp_bias": [True],
    "moe_layer_freq": [2], "no_rope_layers": [[0, 1, 1, 1]], "norm_topk_prob": [True, False],
    "num_key_value_heads": [1, 4], "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5], "per_layer_config": [{"1": {"rms_norm_eps": 0.1}}],
    "qk_layernorm": [True], "residual_multiplier": [3.0], "rope_interleave": [True, False],
    "rope_scaling": [ROPE | LINEAR, LLAMA3], "rope_theta": [777], "scoring_func": ["softmax"],
    "sliding_window": [3], "time_step_limit": [[0.0, 0.05]], "topk_method": ["greedy"],
    "use_sliding_window": [True],
}  # fmt: skip
"""Values of entries, which files of some families have."""
OTHERS_OF_ROPE = {
    "attention_factor": [2.0], "mscale": [0.5], "mscale_all_dim": [0.5], "truncate": [False],
    "partial_rotary_factor": [0.5, 1.0],
}  # fmt: skip
# megatron-core has no such limit, as docs/conversion.md says.
ACCEPTED = {("nemotron-h", "time_step_min")}


def other_values(value: Any) -> list[Any]:
    """Return values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, list):
        return [value[::-1]]
    return [2 * value, value / 2] if isinstance(value, float) else []


def changes(entries: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield entries with other values; entries of rotary embeddings one by one."""
    for key in dict.fromkeys([*entries, *OTHERS]):
        for value in [*other_values(entries.get(key)), *OTHERS.get(key, ())]:
            yield key, value
    rope = entries.get("rope_parameters", {})
    for key in dict.fromkeys([*rope, *OTHERS_OF_ROPE]):
        for value in [*other_values(rope.get(key)), *OTHERS_OF_ROPE.get(key, ())]:
            yield "rope_parameters", rope | {key: value}


def logits(name: str, weights: dict[str, torch.Tensor], **change: Any) -> torch.Tensor | None:
    """Return the logits of a model with one entry changed; None where transformers refuses it."""
    try:
        model = make_model(name, **change).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            return model(TOKENS).logits
    except Exception:
        # transformers raises errors of many kinds.
        return None


@pytest.mark.parametrize("name", others_slow(MODELS, [*MODELS][::6]))
def test_entries_that_change_logits_are_read_or_refused(name):
    torch.manual_seed(0)
    model = make_model(name)
    weights, architecture = model.state_dict(), {"architectures": [type(model).__name__]}
    expected = logits(name, weights)
    arguments = from_config(entries_of(name) | architecture).model
    for key, value in changes(entries_of(name)):
        if (name, key) in ACCEPTED:
            continue
        with suppress(UserError):
            changed = from_config(entries_of(name, **{key: value}) | architecture).model
            if changed == arguments:
                seen = logits(name, weights, **{key: value})
                assert seen is None or torch.allclose(seen, expected, atol=1e-4), (key, value)
