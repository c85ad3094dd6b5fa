"""Tiny random models of transformers'."""

from pathlib import Path

import torch
from safetensors.torch import load_file

EPS = 3e-6
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 64, "rms_norm_eps": EPS,
}  # fmt: skip
TOKENS = torch.arange(40).reshape(2, 20) % 100
DRAWN = {"initializer_range": 0.3}
ROPE = {"rope_type": "default", "rope_theta": 50000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama_model():
    """Build an untied Llama with scaled frequencies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **DRAWN, rope_parameters=LLAMA3))


def tied_llama_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, **DRAWN, tie_word_embeddings=True, rope_parameters=ROPE)
    return LlamaForCausalLM(config)


def mixtral_model():
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **DRAWN, **experts, rope_parameters=ROPE))


def gpt2_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 100, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **DRAWN, n_inner=48, layer_norm_epsilon=EPS))


def nemotron_h_model():
    """Build a Nemotron-H: 20 tokens are three chunks of its scan; its pattern is -M*M--."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    kinds = ["mlp", "linear_attention", "full_attention", "linear_attention", "mlp", "mlp"]
    mamba = {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
             "chunk_size": 8, "time_step_min": 1e-30}  # fmt: skip
    sizes = {key: SIZES[key] for key in SIZES.keys() - {"num_hidden_layers", "rms_norm_eps"}}
    config = NemotronHConfig(**sizes, **DRAWN, **mamba, layers_block_type=kinds)
    return NemotronHForCausalLM(config)


def qwen3_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **DRAWN, rope_parameters=ROPE))


def qwen3_moe_model(**changes):
    """Build a Qwen3-MoE whose second layer has a dense MLP."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
               "norm_topk_prob": True, "mlp_only_layers": [1]} | changes  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **DRAWN, **experts, rope_parameters=ROPE))


def uniform_qwen3_moe_model():
    """Build a Qwen3-MoE with experts in all layers, and probabilities among all experts."""
    return qwen3_moe_model(norm_topk_prob=False, mlp_only_layers=[])


YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip


def deepseek_v3_model(**changes):
    """Build a DeepSeek-V3 with YaRN; two of four groups of experts are chosen for each token."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    attention = {
        "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 20, "kv_lora_rank": 16,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
        "rms_norm_eps": 1e-6, "rope_parameters": YARN,
    }  # fmt: skip
    experts = {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
        "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    }  # fmt: skip
    config = DeepseekV3Config(**SIZES | DRAWN | attention | experts | changes)
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.3 * torch.randn_like(buffer)
    return model


def uniform_deepseek_v3_model():
    """Build a DeepSeek-V3 with experts in all layers, without groups and YaRN."""
    return deepseek_v3_model(
        first_k_dense_replace=0, n_group=1, topk_group=1, rope_parameters=ROPE,
        routed_scaling_factor=1.0,
    )  # fmt: skip


GPT_OSS_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 16,
}  # fmt: skip


def gpt_oss_model(**changes):
    """Build a gpt-oss with windows shorter than 20 tokens, and activations beyond the limit."""
    from transformers import GptOssConfig, GptOssForCausalLM

    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
            "swiglu_limit": 1.5, "rope_parameters": GPT_OSS_YARN}  # fmt: skip
    model = GptOssForCausalLM(GptOssConfig(**SIZES | DRAWN | more | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("_proj_bias"):  # those of experts, together
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def gemma3_model(**changes):
    """Build a Gemma 3 with windows shorter than 20 tokens, and another scale of attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    more = {"sliding_window": 6, "layer_types": kinds, "query_pre_attn_scalar": 9,
            "rope_parameters": ropes, "pad_token_id": None}  # fmt: skip
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | DRAWN | more | changes))


MODELS = {
    "llama": llama_model, "tied llama": tied_llama_model, "mixtral": mixtral_model,
    "gpt-2": gpt2_model, "nemotron-h": nemotron_h_model, "qwen3": qwen3_model,
    "qwen3-moe": qwen3_moe_model, "uniform qwen3-moe": uniform_qwen3_moe_model,
    "deepseek-v3": deepseek_v3_model, "uniform deepseek-v3": uniform_deepseek_v3_model,
    "gpt-oss": gpt_oss_model, "gemma-3": gemma3_model,
}  # fmt: skip


def save(name: str, folder: Path, **options) -> None:
    """Save a model as transformers does, in files as the options say, and its logits."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # drawn as they are, norms and biases could be exchanged
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, **options)
    # Of the model itself: loaded anew, transformers 5.23's rotary frequencies have no value.
    torch.save(model(TOKENS).logits.detach(), folder / "logits.pt")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found
