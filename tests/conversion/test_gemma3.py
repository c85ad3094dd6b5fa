"""Gemma 3: forms of its configuration, what is refused, and a trained model's export."""

import pytest
import torch
from tiny_models import gemma3_model
from training_runs import train

from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.families import FAMILIES, family_of
from megatron_lowbit.conversion.verify import verify
from megatron_lowbit.errors import UserError

FAMILY = FAMILIES["Gemma3ForCausalLM"]
# As google/gemma-3-1b-it's config.json has them, of another size.
OLDER = {
    "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 7,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 100,
}  # fmt: skip


def test_both_forms_of_a_configuration_are_one_model():
    """transformers reads the older form, and writes the newer one."""
    from transformers import Gemma3TextConfig

    older, newer = (
        FAMILY.from_config(config).model for config in (OLDER, Gemma3TextConfig(**OLDER).to_dict())
    )
    assert older == newer
    assert older["window_attn_skip_freq"] == [1, 1, 1, 1, 1, 0, 1]
    assert (older["window_rotary_base"], older["rotary_base"]) == (10000, 1000000)
    assert older["window_size"] == (511, 0)
    assert older["mup_base_head_dim"] == 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu': only 'gelu_pytorch_tanh'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0: only None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn': only 'linear'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, "factor 2.5: .* an integer"),
        ({"rope_local_base_freq": 1.5}, "rope_theta 1.5: Megatron-LM's is an integer"),
        ({"layer_types": ["full_attention"]}, "for each of 7 layers"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "is not one of"),
    ],
)
def test_a_config_that_does_not_fit(change, named):
    from megatron_lowbit.conversion.families import from_config

    with pytest.raises(UserError, match=named):
        from_config(OLDER | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mup_embedding_mult": 2.0}, r"mup_embedding_mult 2.0; a Gemma-3 has 5\.65"),
        ({"mup_attn_scale_power": 1.0}, "mup_attn_scale_power 1.0; a Gemma-3 has 0.5"),
        ({"geglu": False}, "geglu False; a Gemma-3 has True"),
        ({"window_size": (511, 1)}, r"window_size \(511, 1\); a Gemma-3 has 0 tokens ahead"),
    ],
)
def test_a_model_that_does_not_fit(change, named):
    model = FAMILY.from_config(OLDER).model | change
    assert family_of(model) is FAMILY
    with pytest.raises(UserError, match=named):
        family_of(model).to_config(model)


def test_other_families_have_no_parts_of_gemma():
    model = FAMILIES["LlamaForCausalLM"].from_config(OLDER).model | {"geglu": True}
    with pytest.raises(UserError, match="geglu True; a Llama has False"):
        family_of(model).to_config(model)


def test_a_trained_model_in_transformers(tmp_path):
    """A converted model, after two updates in MXFP8, has the same logits in both."""
    torch.manual_seed(0)
    gemma3_model(hidden_size=64, vocab_size=500).save_pretrained(tmp_path / "source")
    start, run = tmp_path / "start", tmp_path / "run"
    to_megatron(tmp_path / "source", start)
    train(f"@{start}/model.args", "--load", start, "--finetune", "--train-iters", 2, "--save", run,
          "--precision-recipe", "mxfp8")  # fmt: skip
    to_hugging_face(run, tmp_path / "out", companions=start / "hugging_face")
    difference, largest = verify(tmp_path / "out", run, tokens=range(20))
    assert difference <= 1e-5 * largest
    changed, _ = verify(tmp_path / "source", run, tokens=range(20))
    assert changed > 1e-3 * largest
