"""Configurations that no test names: each is refused, or has transformers' logits."""

import json

import pytest
import torch
from tiny_models import LINEAR, LLAMA3, MODELS, TOKENS, entries_of, make_model

from megatron_lowbit.conversion.convert import to_megatron
from megatron_lowbit.conversion.verify import verify
from megatron_lowbit.errors import UserError

OLDER_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = [
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"num_key_value_heads": 1, "head_dim": 16},
    {"attention_bias": True},
    {"attention_bias": True, "mlp_bias": True},
    {"num_experts_per_tok": 1},
    {"norm_topk_prob": False},
    {"first_k_dense_replace": 2},
    {"sliding_window": 3, "use_sliding_window": True},
    {"rope_scaling": LINEAR},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": OLDER_YARN},
    {"rope_scaling": OLDER_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    {"rope_scaling": OLDER_YARN, "partial_rotary_factor": 1.0},
    {"rope_theta": 999999.442},
]
NAMES = {model_type: name for name, (model_type, _) in reversed(MODELS.items())}.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_variants(name, tmp_path):
    converted = 0
    for number, variant in enumerate(VARIANTS):
        folder, checkpoint = tmp_path / f"{number}", tmp_path / f"{number} converted"
        torch.manual_seed(0)
        try:
            model = make_model(name, **variant)
            model(TOKENS)
        except Exception:
            continue  # transformers raises errors of many kinds
        model.save_pretrained(folder)
        entries = {"model_type": MODELS[name][0], "architectures": [type(model).__name__]}
        (folder / "config.json").write_text(json.dumps(entries_of(name, **variant) | entries))
        try:
            to_megatron(folder, checkpoint)
        except UserError:
            continue
        difference, largest = verify(folder, checkpoint, range(TOKENS.shape[1]))
        assert difference <= 1e-5 * largest, variant
        converted += 1
    assert converted > 0
