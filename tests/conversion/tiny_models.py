"""Tiny random models of transformers'."""

import json
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_lowbit.checkpoints.reader import CheckpointReader, TensorSlice

EPS = 3e-6
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 64, "rms_norm_eps": EPS,
}  # fmt: skip
TOKENS = torch.arange(40).reshape(2, 20) % 100
DRAWN = {"initializer_range": 0.3}
ROPE = {"rope_type": "default", "rope_theta": 50000.0}
PARTIAL = ROPE | {"partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip


GPT_OSS_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 16,
}  # fmt: skip


GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
             "norm_topk_prob": True, "mlp_only_layers": [1]}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "num_mtp_layers": 0, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "rms_norm_eps": 1e-6,
}  # fmt: skip
# Two of four groups of experts are chosen for each token.
DEEPSEEK_V3 = LATENT | {
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
    "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "num_mtp_layers": 0, "rope_parameters": YARN,
}  # fmt: skip
UNIFORM_DEEPSEEK_V3 = DEEPSEEK_V3 | {
    "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "rope_parameters": ROPE,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
# 20 tokens are three chunks of its scan.
NEMOTRON_H = {
    "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
    "chunk_size": 8, "time_step_min": 1e-30, "layers_block_type": [
        "mlp", "linear_attention", "full_attention", "linear_attention", "mlp", "mlp"],
}  # fmt: skip
MAMBA2 = {"state_size": 16, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
BAMBA = {
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8,
    "attn_layer_indices": [1, 2], "rms_norm_eps": 1e-5, "rope_parameters": ROPE,
}  # fmt: skip
# Windows are shorter than 20 tokens, and activations beyond the limit.
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
           "swiglu_limit": 1.5, "rope_parameters": GPT_OSS_YARN}  # fmt: skip
GEMMA3 = {
    "sliding_window": 6, "query_pre_attn_scalar": 9, "rope_parameters": GEMMA3_ROPE,
    "layer_types": [f"{span}_attention" for span in ("sliding", "sliding", "full", "sliding")],
    "pad_token_id": None,
}  # fmt: skip
GPT2 = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48,
        "layer_norm_epsilon": EPS}  # fmt: skip
MODELS = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama with biases": ("llama", {
        "attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE}),
    "linear llama": ("llama", {"rope_parameters": ROPE | LINEAR}),
    "dynamic llama": ("llama", {"rope_parameters": ROPE | {
        "rope_type": "dynamic", "factor": 4.0}}),
    "yarn qwen2": ("qwen2", {"rope_parameters": ROPE | {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}),
    "scaled yarn llama": ("llama", {"rope_parameters": ROPE | {
        "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "tied llama": ("llama", {"tie_word_embeddings": True, "rope_parameters": ROPE}),
    "mixtral": ("mixtral", MIXTRAL | {"rope_parameters": ROPE}),
    "mixtral with windows": ("mixtral", MIXTRAL | {
        "sliding_window": 6, "rope_parameters": ROPE}),
    "gpt-2": ("gpt2", GPT2),
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "mamba-2": ("mamba2", MAMBA2),
    "bamba": ("bamba", BAMBA),
    "tied mamba-2": ("mamba2", MAMBA2 | {"tie_word_embeddings": True}),
    "tied bamba": ("bamba", BAMBA | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": ROPE}),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE | {"rope_parameters": ROPE}),
    "uniform qwen3-moe": ("qwen3_moe", QWEN3_MOE | {
        "norm_topk_prob": False, "mlp_only_layers": [], "rope_parameters": ROPE}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK_V3),
    "uniform deepseek-v3": ("deepseek_v3", UNIFORM_DEEPSEEK_V3),
    "qwen2-moe": ("qwen2_moe", QWEN3_MOE | {
        "shared_expert_intermediate_size": 24, "rope_parameters": ROPE}),
    "glm-4.5-moe": ("glm4_moe", ROUTED | {
        "attention_bias": True, "use_qk_norm": True, "rope_parameters": PARTIAL}),
    "dots.llm1": ("dots1", ROUTED | {"sliding_window": 6, "max_window_layers": 2,
                                     "rope_parameters": ROPE}),
    "solar-open": ("solar_open", ROUTED | {
        "first_k_dense_replace": 0, "rope_parameters": ROPE}),
    "deepseek-v2": ("deepseek_v2", LATENT | ROUTED | {
        "q_lora_rank": None, "norm_topk_prob": False,
        "rope_parameters": YARN | {"factor": 4.0}}),
    "youtu": ("youtu", LATENT | {"rope_parameters": ROPE}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gemma-3": ("gemma3_text", GEMMA3),
    "seed-oss": ("seed_oss", {"rope_parameters": ROPE}),
    "smollm3": ("smollm3", {
        "no_rope_layers": [1, 0, 0, 1], "pad_token_id": None, "rope_parameters": ROPE}),
    "phi-3": ("phi3", {
        "sliding_window": 6, "pad_token_id": None, "rope_parameters": PARTIAL}),
    "qwen2": ("qwen2", {"rope_parameters": ROPE}),
    "qwen2 with windows": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2,
        "rope_parameters": ROPE}),
    "qwen3 with windows": ("qwen3", {
        "use_sliding_window": True, "sliding_window": 6, "layer_types": GEMMA3["layer_types"],
        "rope_parameters": ROPE}),
    "mistral": ("mistral", {"sliding_window": 6, "rope_parameters": ROPE}),
    "ministral": ("ministral", {
        "sliding_window": 6, "layer_types": GEMMA3["layer_types"], "rope_parameters": ROPE}),
    "cwm": ("cwm", {"sliding_window": 6, "rope_parameters": LLAMA3}),
    "granite": ("granite", {
        "attention_multiplier": 0.21, "embedding_multiplier": 5.3, "logits_scaling": 7.0,
        "residual_multiplier": 0.22, "rope_parameters": ROPE}),
    "biased granite": ("granite", {
        "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.21,
        "rope_parameters": ROPE}),
    "arcee": ("arcee", {"rope_parameters": ROPE}),
    "gemma": ("gemma", {"rope_parameters": ROPE, "pad_token_id": None}),
    "glm": ("glm", {"rope_parameters": PARTIAL, "pad_token_id": None}),
    "glm-4": ("glm4", {
        "attention_bias": False, "rope_parameters": PARTIAL, "pad_token_id": None}),
    "ernie-4.5": ("ernie4_5", {"rope_parameters": ROPE}),
    "helium": ("helium", {"head_dim": 8, "rope_parameters": ROPE}),
    "gpt-bigcode": ("gpt_bigcode", GPT2),
    "starcoder2": ("starcoder2", {
        "norm_epsilon": EPS, "sliding_window": 6, "rope_parameters": ROPE}),
    "stablelm": ("stablelm", {
        "layer_norm_eps": EPS, "use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "nemotron": ("nemotron", {
        "norm_eps": EPS, "rope_parameters": PARTIAL | LINEAR}),
    "jais-2": ("jais2", {"layer_norm_eps": EPS, "rope_parameters": ROPE}),
    "mistral without windows": ("mistral", {"sliding_window": None, "rope_parameters": ROPE}),
}  # fmt: skip
"""Types of models, and their entries beside ``SIZES``."""
_GPT = SIZES.keys() - {"vocab_size"}
_WITHOUT = {"gpt2": _GPT, "gpt_bigcode": _GPT, "stablelm": ("head_dim",),
            "mamba2": _GPT - {"hidden_size", "num_hidden_layers", "head_dim"},
            "nemotron_h": ("num_hidden_layers", "rms_norm_eps")}  # fmt: skip
"""Entries of ``SIZES`` that a type has not."""


def entries_of(name: str, **changes) -> dict:
    """Return the entries of a model's config.json, with some of them changed."""
    model_type, entries = MODELS[name]
    entries = SIZES | DRAWN | entries | changes
    return {k: v for k, v in entries.items() if k not in _WITHOUT.get(model_type, ())}


def make_model(name: str, **changes):
    """Build a model with some entries changed, and biases that are not zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # Some types of configurations add to the entries of rotary embeddings in place.
    entries = deepcopy(entries_of(name, **changes))
    config = AutoConfig.for_model(MODELS[name][0], **entries)
    model = AutoModelForCausalLM.from_config(config)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer += 0.3 * torch.randn_like(buffer)
    for key, parameter in model.named_parameters():
        if key.endswith("_proj_bias"):  # those of gpt-oss experts, together
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def save(name: str, folder: Path, **options) -> None:
    """Save a model as transformers does, in files as the options say, and its logits."""
    torch.manual_seed(0)
    model = make_model(name).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # drawn as they are, norms and biases could be exchanged
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, **options)
    # Of the model itself: loaded anew, transformers 5.23's rotary frequencies have no value.
    torch.save(model(TOKENS).logits.detach(), folder / "logits.pt")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def check_alike(folder: Path, other: Path) -> None:
    """Compare all tensors of two folders bit for bit."""
    tensors, expected = weights(folder), weights(other)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape, name
        bits = [part.reshape(-1).view(torch.uint8) for part in (tensor, tensors[name])]
        assert torch.equal(*bits), name


def layer_tensor(
    checkpoint: Path, key: str, indices: tuple[int, ...] = (), lengths: tuple[int, ...] = ()
) -> torch.Tensor:
    """Read a weight of the layers of a converted checkpoint, or a slice of it."""
    target = TensorSlice(f"decoder.layers.{key}.weight", indices, lengths)
    return CheckpointReader(checkpoint / "iter_0000000").read(target)
