"""config.json of every family: forms and defaults, and what is refused in either direction."""

import json
from copy import deepcopy

import pytest
import torch
from tiny_models import DRAWN, EPS, MODELS, PARTIAL, ROPE, SIZES, YARN, make_model

from megatron_lowbit.checkpoints.model_arguments import argument_file, model_of, saved_arguments
from megatron_lowbit.conversion.families import FAMILIES, family_of, from_config
from megatron_lowbit.errors import UserError
from tests.marks import others_slow

# As google/gemma-3-1b-it's config.json has them, of another size.
OLDER_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 7,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 100,
}  # fmt: skip
OF_YARN = {"rope_type": "yarn", "factor": 4.0}
FULL, CHUNKED = "full_attention", "chunked_attention"


def config_of(name: str) -> dict:
    """Return the config.json of a tiny model."""
    if name == "gemma3":
        return OLDER_GEMMA3
    with torch.device("meta"):
        model = make_model(name)
    return json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gpt-2", {"activation_function": "relu"}, "activation_function 'relu'.*'gelu_new'"),
        ("gpt-2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("nemotron-h", {"layers_block_type": ["moe"]}, "'moe'.*linear_attention, full_attention"),
        ("nemotron-h", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06.*1e-05"),
        ("nemotron-h", {"mlp_bias": True}, "mlp_bias True"),
        ("nemotron-h", {"conv_kernel": 3}, "conv_kernel 3.*4"),
        ("qwen3-moe", {"mlp_only_layers": [4]}, "mlp_only_layers 4: the model has 4 layers"),
        ("qwen3-moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers .*must be a list of integers"),
        ("qwen3-moe", {"decoder_sparse_step": 5}, "decoder_sparse_step leave no experts"),
        ("qwen3-moe", {"num_experts_per_tok": 1}, "norm_topk_prob: Megatron-LM does not normalize"),
        ("qwen3-moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5: .* from 1 to 4"),
        ("qwen3-moe", {"num_local_experts": None}, "needs the entry 'num_experts'"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3-moe", {"attention_bias": True}, "attention_bias True"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads 2: must be 4, all heads"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob False: Megatron-LM normalizes"),
        ("deepseek-v3", {"topk_group": 3}, r"topk_group 3: .*num_experts_per_tok // topk_group"),
        ("deepseek-v3", {"n_group": 3}, "n_group 3: must divide n_routed_experts 8"),
        ("deepseek-v3", {"n_group": 8}, "n_group 8: must divide .* groups of two or more"),
        ("deepseek-v3", {"num_experts_per_tok": 5}, "num_experts_per_tok 5: topk_group 2 .*have 4"),
        ("deepseek-v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05: only 1e-06"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave False"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"first_k_dense_replace": 5}, "first_k_dense_replace 5: .* from 0 to 4"),
        ("deepseek-v3", {"rope_parameters": YARN | {"beta_fast": 16}}, "beta_fast 16.0: .*32.0"),
        ("deepseek-v3", {"rope_parameters": YARN | {"original_max_position_embeddings": 64}},
         "original_max_position_embeddings 64.0: megatron-core's is 4096"),
        ("deepseek-v3", {"rope_parameters": YARN | {"truncate": False}}, "truncate"),
        ("deepseek-v3", {"rope_parameters": YARN | {"attention_factor": 1.2}}, "attention_factor"),
        ("deepseek-v3", {"rope_parameters": YARN | {"mscale_all_dim": 0}},
         "mscale 0.7 with mscale_all_dim 0.0"),
        ("deepseek-v3", {"rope_parameters": ROPE | {"rope_type": "linear"}}, "rope_type 'linear'"),
        ("llama", {"is_causal": False}, "is_causal False: only True"),
        ("llama", {"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config .*: only None"),
        ("llama", {"model_type": "mistral"}, "'mistral' is not the type of .*LlamaForCausalLM"),
        ("bamba", {"rope_parameters": PARTIAL | {"partial_rotary_factor": 1.0}},
         "partial_rotary_factor 1.0: only 0.5"),
        ("glm-4.5-moe", {"rope_parameters": PARTIAL | OF_YARN},
         "partial_rotary_factor 0.5: .*YaRN turns all channels"),
        ("ernie-4.5", {"rope_parameters": ROPE | OF_YARN}, "rope_type 'yarn': only 'default'"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1: .* from 2 to 4"),
        ("gpt-oss", {"num_experts_per_tok": 1}, "num_experts_per_tok 1: .* from 2 to 4"),
        ("gpt-oss", {"rope_parameters": {"rope_type": "default"}}, "rope_type 'default'"),
        ("gpt-oss", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
         "mscale"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0: only 1.702"),
        ("gpt-oss", {"attention_bias": False}, "attention_bias False"),
        ("gpt-oss", {"layer_types": [FULL]}, "layer_types must be .* for each of 4 layers"),
        ("gpt-oss", {"layer_types": [FULL, FULL, FULL, CHUNKED]}, "layer_types must be"),
        ("gemma3", {"hidden_activation": "gelu"}, "'gelu': only 'gelu_pytorch_tanh'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0: only None"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
         "rope_type 'yarn': only 'linear'"),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
         "factor 2.5: .* an integer"),
        ("gemma3", {"rope_local_base_freq": 1.5}, "rope_theta 1.5: Megatron-LM's is an integer"),
        ("gemma3", {"layer_types": [FULL]}, "for each of 7 layers"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "is not one of"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit(name, change, named):
    with pytest.raises(UserError, match=named):
        from_config(config_of(name) | change)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3", "nemotron-h"])
def test_null_is_false_or_0_and_no_other_default(name):
    """Transformers 4 reads it so. Entries that are converted with one value are checked."""
    config = config_of(name)
    fixed = FAMILIES[config["architectures"][0]].fixed
    assert False in fixed.values()
    for key, value in fixed.items():
        if not value:
            assert from_config(config | {key: None}) == from_config(config), key
        else:
            with pytest.raises(UserError, match=f"{key} None: only {value!r}"):
                from_config(config | {key: None})


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("llama", {"swiglu": False}, "swiglu False; a Llama has True"),
        ("llama", {"geglu": True}, "geglu True; a Llama has False"),
        ("llama", {"activation_func_clamp_value": 7.0},
         "activation_func_clamp_value 7.0; a Llama has None"),
        ("llama", {"glu_linear_offset": 1.0}, "glu_linear_offset 1.0; a Llama has 0.0"),
        ("llama", {"heterogeneous_layers_config_path": "a"}, "layers_config_path 'a'"),
        ("mixtral", {"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input True"),
        ("mixtral", {"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size 32"),
        ("qwen2-moe", {"moe_shared_expert_glu_interleave_size": 32}, "_interleave_size 32"),
        ("gpt-2", {"normalization": "RMSNorm"}, "normalization 'RMSNorm'; a GPT-2 has 'LayerNorm'"),
        ("nemotron-h", {"squared_relu": False}, "squared_relu False; a Nemotron-H has True"),
        ("nemotron-h", {"layernorm_epsilon": EPS}, "layernorm_epsilon 3e-06.*1e-05"),
        ("qwen3-moe", {"moe_shared_expert_intermediate_size": 40},
         "moe_shared_expert_intermediate_size 40; a Qwen3-MoE has None"),
        ("qwen3-moe", {"moe_router_score_function": "sigmoid"},
         "score_function 'sigmoid'; a Qwen3-MoE has 'softmax'"),
        ("qwen3-moe", {"qk_layernorm": False}, "moe_layer_freq .*; a Mixtral has 1"),
        ("deepseek-v3", {"qk_layernorm": False}, "qk_layernorm False; a DeepSeek-V3 has True"),
        ("deepseek-v3", {"moe_router_enable_expert_bias": False},
         "moe_router_enable_expert_bias False; a DeepSeek-V3 has True"),
        ("deepseek-v3", {"moe_layer_freq": [1, 0, 1, 1]}, "has its dense layers first"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1]}, r"moe_layer_freq \[0, 1\]: must be"),
        ("deepseek-v3", {"moe_router_group_topk": 1}, "moe_router_group_topk 1: Megatron-LM"),
        ("deepseek-v3", {"moe_shared_expert_intermediate_size": 30},
         "has a multiple of moe_ffn_hidden_size 20"),
        ("deepseek-v3", {"mscale": 2.0, "mscale_all_dim": 0.0}, "mscale 2.0 with"),
        ("deepseek-v3", {"mscale": "1"}, "mscale '1': must be a finite number"),
        ("deepseek-v3", {"rope_type": "rope"}, "rotary_scaling_factor 40.0; .* has 1.0"),
        ("gpt-oss", {"window_size": (127, 2)}, r"window_size \(127, 2\)"),
        ("gpt-oss", {"glu_linear_offset": 0.0}, "glu_linear_offset 0.0; a gpt-oss has 1.0"),
        ("gpt-oss", {"softmax_type": "off-by-one"},
         "softmax_type 'off-by-one'; a gpt-oss has 'learnable'"),
        ("gpt-oss", {"mscale": 0.7}, "mscale 0.7"),
        ("gemma3", {"mup_embedding_mult": 2.0}, r"mup_embedding_mult 2.0; a Gemma-3 has 5\.65"),
        ("gemma3", {"mup_attn_scale_power": 1.0}, "mup_attn_scale_power 1.0; a Gemma-3 has 0.5"),
        ("gemma3", {"mup_base_hidden_size": 8}, "mup_output_mult 0.25; a Gemma-3 has 1.0"),
        ("gemma3", {"geglu": False}, "geglu False; a Gemma-3 has True"),
        ("gemma3", {"window_size": (511, 1)},
         r"window_size \(511, 1\); a Gemma-3 has 0 tokens ahead"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit(name, change, named):
    """As a run's arguments say it."""
    args = saved_arguments(from_config(config_of(name)).model)
    vars(args).update(change)
    with pytest.raises(UserError, match=named):
        model = model_of(args, 100)
        family_of(model).to_config(model)


@pytest.mark.parametrize(
    ("name", "pattern", "named"),
    [
        ("mamba-2", "MM*M", r"hybrid_layer_pattern MM\*M; a Mamba-2 has only M"),
        ("bamba", "M-M*M-M-", r"a Bamba has pairs of M or \* and -"),
    ],
)
def test_a_hybrid_of_other_blocks(name, pattern, named):
    config = config_of(name)
    model = from_config(config).model | {"hybrid_layer_pattern": pattern}
    with pytest.raises(UserError, match=named):
        FAMILIES[config["architectures"][0]].to_config(model)


def test_yarn_of_some_channels_is_not_exported():
    """Megatron-LM's YaRN turns all channels, whatever the argument says."""
    config = config_of("glm-4.5-moe")
    rope = {"rope_parameters": PARTIAL | OF_YARN | {"partial_rotary_factor": 1.0}}
    model = from_config(config | rope).model
    family = FAMILIES[config["architectures"][0]]
    assert family.to_config(model)["rope_scaling"]["rope_type"] == "yarn"
    with pytest.raises(UserError, match=r"rotary_percent 0\.5; a model with YaRN has 1\.0"):
        family.to_config(model | {"rotary_percent": 0.5})


@pytest.mark.parametrize("name", MODELS)
def test_a_run_without_a_config_finds_a_family_of_its_model(name):
    """The family may be another one than the source's, whose models are the same."""
    model = model_of(saved_arguments(from_config(config_of(name)).model), 100)
    written = family_of(model).to_config(model)
    again = model_of(saved_arguments(from_config(written).model), 100)
    assert again == model


def test_both_forms_of_a_gemma3_are_one_model():
    """transformers reads the older form, and writes the newer one."""
    from transformers import Gemma3TextConfig

    newer = Gemma3TextConfig(**OLDER_GEMMA3).to_dict()
    older, newer = (from_config(config).model for config in (OLDER_GEMMA3, newer))
    assert older == newer
    assert older["window_attn_skip_freq"] == [1, 1, 1, 1, 1, 0, 1]
    assert (older["window_rotary_base"], older["rotary_base"]) == (10000, 1000000)
    assert older["window_size"] == (511, 0)
    assert older["mup_base_head_dim"] == 1.0


def test_mamba_heads_by_default():
    """Twice the hidden size over the head dimension: 8, as the test's model has."""
    family, model = FAMILIES["NemotronHForCausalLM"], from_config(config_of("nemotron-h")).model
    silent = model | {"mamba_num_heads": None}
    assert family.rules(silent) == family.rules(model)
    assert family.to_config(silent) == family.to_config(model)


def test_every_second_layer_has_experts():
    """decoder_sparse_step counts from the other end than --moe-layer-freq."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
    config = Qwen3MoeConfig(**SIZES, **DRAWN, **experts, architectures=["Qwen3MoeForCausalLM"])
    model = from_config(config.to_dict()).model
    assert model["moe_layer_freq"] == [0, 1, 0, 1]
    assert "--moe-layer-freq=[0,1,0,1]\n" in argument_file("", model)
    written = family_of(model).to_config(model)
    assert (written["decoder_sparse_step"], written["mlp_only_layers"]) == (1, [0, 2])
    # Megatron-LM's own count begins with the first layer.
    args = saved_arguments(model | {"moe_layer_freq": 2})
    assert model_of(args, 100)["moe_layer_freq"] == [1, 0, 1, 0]


@pytest.mark.parametrize("normalized", [True, False])
def test_probabilities_of_the_router(normalized):
    """Normalized ones are Megatron-LM's softmax of the chosen; others its softmax before them."""
    model = from_config(config_of("qwen3-moe") | {"norm_topk_prob": normalized}).model
    assert model["moe_router_pre_softmax"] is not normalized
    assert family_of(model).to_config(model)["norm_topk_prob"] is normalized


OTHERS = {
    "deepseek_v2": {"num_experts_per_tok": 2, "num_hidden_layers": 4},
    "nemotron_h": {"layers_block_type": ["mlp", "linear_attention", "full_attention"]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
              "norm_topk_prob": True, "num_hidden_layers": 4},
}  # fmt: skip
"""Entries of a model type without which its default is not converted."""


@pytest.mark.parametrize("name", others_slow(FAMILIES, [*FAMILIES][::3]))
def test_missing_entries_have_the_defaults_of_transformers(name):
    """Each entry of transformers' own default is omitted by itself, with those inside of it."""
    from transformers import AutoConfig

    family = FAMILIES[name]
    others = OTHERS.get(family.model_type, {"num_hidden_layers": 4})
    config = AutoConfig.for_model(family.model_type, **others)
    complete = {**config.to_dict(), **family.fixed}
    for key, value in complete.items():
        parts = [{k: v for k, v in complete.items() if k != key}]
        for inside in value if isinstance(value, dict) else ():
            parts.append({**complete, key: {k: v for k, v in value.items() if k != inside}})
        for part in parts:
            try:
                model = family.from_config(part).model
            except UserError:  # refused, not guessed
                continue
            filled = type(config)(**deepcopy(part)).to_dict()
            assert family.from_config(filled).model == model, key
