"""config.json of published models, with smaller sizes: the arguments, and the way back."""

import shlex

import pytest

from megatron_lowbit.checkpoints.model_arguments import argument_file, model_of, saved_arguments
from megatron_lowbit.conversion.families import FAMILIES, family_of, from_config
from megatron_lowbit.conversion.families.refused import REFUSED
from megatron_lowbit.conversion.families.with_images import text_config
from megatron_lowbit.errors import UserError

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 32768,
    "hidden_act": "silu",
}  # fmt: skip
# Values of mistralai/Mistral-7B-v0.1 and -v0.3.
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL_3 = MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None}
# Those of Qwen/Qwen2.5-7B.
QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
    "max_window_layers": 28, "tie_word_embeddings": False, "use_mrope": False,
}  # fmt: skip
# Those of HuggingFaceTB/SmolLM3-3B and ByteDance-Seed/Seed-OSS-36B-Instruct.
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
    "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "mlp_bias": False,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip
SEED_OSS = {
    "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True,
    "attention_dropout": 0.1, "attention_out_bias": False, "head_dim": 128, "mlp_bias": False,
    "residual_dropout": 0.1, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0, "tie_word_embeddings": False,
}  # fmt: skip
# Those of microsoft/Phi-3-mini-4k-instruct, -128k-instruct, and phi-4.
PHI_3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False,
    "embd_pdrop": 0.0, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
    "tie_word_embeddings": False,
}  # fmt: skip
PHI_4 = PHI_3 | {"rope_theta": 250000, "sliding_window": None}
LONG_ROPE = {"type": "longrope", "long_factor": [1.5] * 8, "short_factor": [1.0] * 8}
# Those of ibm-granite/granite-3.3-8b-base and allenai/OLMo-2-1124-7B.
GRANITE = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0,
    "residual_multiplier": 0.22, "tie_word_embeddings": True,
}  # fmt: skip
OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000,
}  # fmt: skip
# As the pages of Qwen2.5 and Qwen3 say for long texts, and deepseek-ai/deepseek-coder-6.7b-base.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"type": "linear", "factor": 4.0}
DEEPSEEK_CODER = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6,
    "rope_scaling": LINEAR, "rope_theta": 100000, "tie_word_embeddings": False,
}  # fmt: skip
# Those of ibm-granite/granite-3b-code-base-2k.
GRANITE_CODE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True,
    "mlp_bias": True, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000,
    "tie_word_embeddings": True,
}  # fmt: skip
# YaRN with a scale that has no effect, and values of bigcode/starcoder2-3b and of
# mistralai/Ministral-8B-Instruct-2410, which AutoModelForCausalLM does not load as a Mistral.
ARCEE = {
    "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "rms_norm_eps": 1e-5,
    "hidden_act": "relu2", "rope_theta": 10000.0, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn"},
}  # fmt: skip
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "use_bias": True,
    "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
}  # fmt: skip
MINISTRAL = MISTRAL | {"layer_types": ["full_attention", *["sliding_attention"] * 3]}
PUBLISHED = {
    "Arcee, YaRN": (
        ARCEE,
        "--position-embedding-type=yarn --rotary-scaling-factor=20.0 --mscale=1.0",
        "--mscale-all-dim=1",
    ),
    "StarCoder2-3B": (STARCODER2, "--rotary-base=999999 --window-size=4095,0", "--swiglu"),
    "Ministral-8B": (
        MINISTRAL,
        "--window-size=4095,0 --window-attn-skip-freq=[0,1,1,1]",
        "--add-qkv-bias",
    ),
    "Mistral-7B-v0.1": (
        MISTRAL,
        "--window-size=4095,0 --window-attn-skip-freq=[1,1,1,1] --rotary-base=10000",
        "--add-qkv-bias",
    ),
    "Mistral-7B-v0.3": (MISTRAL_3, "--rotary-base=1000000 --norm-epsilon=1e-05", "--window-size"),
    "SmolLM3-3B": (
        SMOLLM3,
        "--no-rope-freq=[0,0,0,1] --rotary-base=5000000",
        "--untie-embeddings-and-output-weights",
    ),
    "Seed-OSS-36B": (SEED_OSS, "--add-qkv-bias --kv-channels=128", "--window-size"),
    "Phi-3-mini-4k": (PHI_3, "--window-size=2046,0 --rotary-base=10000", "--add-qkv-bias"),
    "phi-4": (PHI_4, "--rotary-base=250000 --rotary-percent=1.0", "--window-size"),
    "Qwen2.5-7B": (QWEN_2, "--add-qkv-bias --disable-bias-linear", "--window-size"),
    "Qwen2.5-7B, YaRN": (
        QWEN_2 | {"rope_scaling": YARN},
        "--position-embedding-type=yarn --rotary-scaling-factor=4.0 --mscale=1.0"
        " --yarn-original-max-position-embeddings=32768 --yarn-beta-fast=32.0",
        "--rotary-seq-len-interpolation-factor",
    ),
    "granite-3.3-8b": (
        GRANITE,
        "--use-mup --mup-embedding-mult=12.0 --mup-attn-scale-power=0.0 --residual-multiplier=0.22"
        " --mup-base-head-dim=6.103515625e-05 --mup-output-mult=0.0625",
        "--untie-embeddings-and-output-weights",
    ),
    "granite-3b-code": (GRANITE_CODE, "--swiglu --norm-epsilon=1e-05", "--disable-bias-linear"),
    "deepseek-coder-6.7b": (
        DEEPSEEK_CODER,
        "--rotary-seq-len-interpolation-factor=4 --position-embedding-type=rope",
        "--yarn",
    ),
    "Qwen2.5-7B, windows": (
        QWEN_2 | {"use_sliding_window": True, "max_window_layers": 3},
        "--window-size=131071,0 --window-attn-skip-freq=[0,0,0,1]",
        "--disable-bias-linear=",
    ),
    "Qwen2.5-0.5B": (
        QWEN_2 | {"tie_word_embeddings": True},
        "--add-qkv-bias",
        "--untie-embeddings-and-output-weights",
    ),
}
"""Models with arguments that they have, and the starts of others that they have not."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_arguments(name):
    config, flags, others = PUBLISHED[name]
    converted = from_config(SIZES | config)
    arguments = shlex.split(argument_file(converted.name, converted.model), comments=True)
    assert {*flags.split()} <= {*arguments}
    assert not [word for word in arguments if word.startswith(tuple(others.split()))]


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_export_names_the_family_of_its_source(name):
    config = SIZES | PUBLISHED[name][0]
    source = from_config(config)
    model = model_of(saved_arguments(source.model), 100)
    family = family_of(model, config)
    assert family.name == source.name
    assert family.from_config(config | family.to_config(model)) == source


def test_a_model_of_another_family_than_its_source():
    """A Llama with the tokenizer of a gpt-oss, and a window that a Llama has not."""
    sources = {
        family.name: {"architectures": [family.architecture]} for family in FAMILIES.values()
    }
    model = from_config(SIZES | MISTRAL_3).model
    model = model_of(saved_arguments(model), 100)
    assert family_of(model).name == "Llama"
    assert family_of(model, sources["gpt-oss"]).name == "Llama"
    windows = model | {"window_size": (4095, 0), "window_attn_skip_freq": [1, 1, 1, 1]}
    assert family_of(windows, sources["Llama"]).name == "Mistral"
    with pytest.raises(UserError, match=r"window_attn_skip_freq \[1, 0, 1, 1\]; a Mistral has"):
        family_of(windows).to_config(windows | {"window_attn_skip_freq": [1, 0, 1, 1]})


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers must be 1 or 0 for each of 4 layers"),
        (SMOLLM3, {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers must be 1 or 0"),
        (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window True: only False"),
        (SEED_OSS, {"attention_out_bias": True}, "attention_out_bias True: only False"),
        (PHI_3, {"rope_scaling": LONG_ROPE}, "rope_type 'longrope': only 'default', "),
        (PHI_3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5: must be at most 1"),
        (
            QWEN_2,
            {"rope_scaling": {"type": "other", "factor": 2.0}},
            "rope_type 'other': only 'default', 'dynamic', 'linear', 'llama3', 'yarn' are",
        ),
        (QWEN_2, {"rope_scaling": YARN | {"attention_factor": 1.1}}, "attention_factor 1.1: Meg"),
        (QWEN_2, {"rope_scaling": LINEAR | {"factor": 1.5}}, "factor 1.5: .* is an integer"),
        (GRANITE_CODE, {"mlp_bias": False}, "attention_bias True with mlp_bias False: Megatron-LM"),
        (OLMO_2, {}, "Olmo2ForCausalLM normalizes queries and keys over all heads"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window 0: must be an integer from 1"),
    ],
)
def test_what_is_refused_is_named(config, change, named):
    with pytest.raises(UserError, match=named):
        from_config(SIZES | config | change)


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_that_is_refused(architecture):
    """transformers has it, and the error names another one that is converted."""
    import transformers

    assert hasattr(transformers, architecture)
    assert architecture not in FAMILIES
    reason, nearest = REFUSED[architecture]
    assert nearest in FAMILIES
    with pytest.raises(UserError, match=f"{reason}.* is {nearest} .*conversion"):
        from_config({"architectures": [architecture]})


def test_the_text_model_of_a_model_with_images():
    text = SIZES | MISTRAL_3
    del text["architectures"]
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text | {"tie_word_embeddings": True},
        "tie_word_embeddings": False,  # The output layer is the whole model's.
    }
    assert text_config(whole, "config.json") == SIZES | MISTRAL_3
    assert text_config(SIZES | MISTRAL_3, "config.json") is None
    whole["text_config"] = {"model_type": "ministral3"}
    with pytest.raises(UserError, match="text_config: model_type ministral3 is of no family"):
        text_config(whole, "config.json")


def test_layers_without_rope_are_counted_by_either_side():
    """By default of transformers and by Megatron-LM's --no-rope-freq 4, it is every fourth."""
    listed = from_config(SIZES | SMOLLM3).model
    config = {key: value for key, value in SMOLLM3.items() if key != "no_rope_layers"}
    assert from_config(SIZES | config).model == listed
    run = saved_arguments(listed | {"no_rope_freq": 4})
    assert model_of(run, 100)["no_rope_freq"] == listed["no_rope_freq"] == [0, 0, 0, 1]


def test_two_scalings_together_are_not_exported():
    model = model_of(saved_arguments(from_config(SIZES | DEEPSEEK_CODER).model), 100)
    with pytest.raises(UserError, match="in several ways; transformers knows one at a time"):
        family_of(model).to_config(model | {"use_rope_scaling": True, "rope_scaling_factor": 8.0})
    yarn = model_of(
        saved_arguments(from_config(SIZES | QWEN_2 | {"rope_scaling": YARN}).model), 100
    )
    with pytest.raises(UserError, match=r"mscale 0\.7 with mscale_all_dim 0\.0"):
        family_of(yarn).to_config(yarn | {"mscale": 0.7})
