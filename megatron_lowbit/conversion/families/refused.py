"""Well-known architectures that Megatron-LM 0.19.2 does not compute, each with its reason."""

_LLAMA, _MIXTRAL = "LlamaForCausalLM", "MixtralForCausalLM"
_QWEN3, _QWEN3_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
_GPT2 = "GPT2LMHeadModel"
_ALIBI = "has ALiBi instead of position embeddings"
_MAMBA1 = "has Mamba-1 blocks; Megatron-LM has Mamba-2 blocks"
_NORMS = "normalizes queries and keys over all heads; Megatron-LM normalizes each head"
_LATER_NORMS = "normalizes queries and keys after the rotary embeddings; Megatron-LM does before"
_NO_INPUT_NORM = "has no norm before attention and MLP; Megatron-LM's layers begin with one"
_PARALLEL = "computes attention and MLP in parallel; Megatron-LM's layers compute one by one"
REFUSED = {
    "ApertusForCausalLM": ("has the activation xIELU, which Megatron-LM lacks", _QWEN3),
    "BloomForCausalLM": (_ALIBI, _GPT2),
    "Cohere2ForCausalLM": (_PARALLEL, _LLAMA),
    "CohereForCausalLM": (_PARALLEL, _LLAMA),
    "Ernie4_5_MoeForCausalLM": (
        "has a softmax router with biases of its choice; Megatron-LM has these biases for a "
        "sigmoid router",
        "Ernie4_5ForCausalLM",
    ),
    "Exaone4ForCausalLM": (_NO_INPUT_NORM, _QWEN3),
    "FalconForCausalLM": (_PARALLEL, _GPT2),
    "FalconH1ForCausalLM": (
        "computes attention and Mamba-2 in parallel; Megatron-LM's blocks compute one by one",
        "BambaForCausalLM",
    ),
    "FlexOlmoForCausalLM": (_NORMS, _QWEN3_MOE),
    "GPTJForCausalLM": (_PARALLEL, _GPT2),
    "GPTNeoXForCausalLM": (_PARALLEL, _GPT2),
    "Gemma2ForCausalLM": (
        "caps the scores of attention and the logits; Megatron-LM caps neither",
        "GemmaForCausalLM",
    ),
    "GraniteMoeForCausalLM": (
        "stores the experts of a layer in one tensor, which is not separated",
        "GraniteForCausalLM",
    ),
    "GraniteMoeHybridForCausalLM": (
        "has a residual_multiplier, which neither Megatron-LM's hybrids nor this project's have",
        "BambaForCausalLM",
    ),
    "HunYuanDenseV1ForCausalLM": (_LATER_NORMS, _QWEN3),
    "HunYuanMoEV1ForCausalLM": (_LATER_NORMS, _QWEN3_MOE),
    "JambaForCausalLM": (_MAMBA1, "BambaForCausalLM"),
    "MambaForCausalLM": (_MAMBA1, "Mamba2ForCausalLM"),
    "MiniMaxM2ForCausalLM": (_NORMS, "Glm4MoeForCausalLM"),
    "Ministral3ForCausalLM": (
        "scales queries by their positions, which Megatron-LM lacks",
        "MinistralForCausalLM",
    ),
    "MptForCausalLM": (_ALIBI, _GPT2),
    "OPTForCausalLM": ("has MLPs with ReLU, which Megatron-LM lacks", _GPT2),
    "Olmo2ForCausalLM": (_NORMS, _QWEN3),
    "Olmo3ForCausalLM": (_NORMS, _QWEN3),
    "OlmoeForCausalLM": (_NORMS, _QWEN3_MOE),
    "PhiForCausalLM": (_PARALLEL, _LLAMA),
    "Qwen3NextForCausalLM": (
        "has gated delta net layers, for which Megatron-LM needs Transformer Engine layers and "
        "flash-linear-attention; its local layers have none",
        _QWEN3_MOE,
    ),
    "PhimoeForCausalLM": ("has a router by SparseMixer, which Megatron-LM lacks", _MIXTRAL),
}
"""Reasons, each with the most similar architecture that is converted, by names in config.json."""
