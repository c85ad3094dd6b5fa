"""Arguments that training or a recipe refuses before the model is built."""

from argparse import Namespace

import pytest

from megatron_lowbit.arguments import compatibility, front_parser
from megatron_lowbit.arguments.rows import refuse
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.recipe_hook import use_recipe
from megatron_lowbit.megatron.run.workarounds import train_biases_of_experts
from megatron_lowbit.recipes import load_recipe, load_recipes

# isort: split
from megatron.core.transformer.enums import CudaGraphModule

USUAL = {
    **vars(front_parser().parse_args([])), "transformer_impl": "local", "eval_iters": 0,
    "micro_batch_size": 2, "seq_length": 32, "position_embedding_type": "rope",
    "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
    "expert_gtp_weight_remat_size": 1, "virtual_pipeline_model_parallel_size": None,
    "use_layer_wise_distributed_optimizer": False,
}  # fmt: skip
"""Arguments of local layers: the defaults, and what Megatron-LM's validation adds to them."""


def hooks(recipe: list[str] | None, **more: object) -> list:
    model_config = Namespace(pre_wrap_hooks=[], post_wrap_hooks=[])
    use_recipe(model_config, Namespace(**{**USUAL, "precision_recipe": recipe, **more}))
    return model_config.pre_wrap_hooks


def test_a_recipe_is_one_hook_and_none_changes_nothing():
    assert len(hooks(["nvfp4"])) == 1
    assert hooks(None, cuda_graph_impl="transformer_engine") == []


@pytest.mark.parametrize(
    ("names", "problem"),
    [([], "needs a YAML file or one of "), (["bf16"] * 3, "takes at most")],
)
def test_a_script_of_ones_own_gives_one_recipe_or_two(names, problem):
    with pytest.raises(UserError, match=f"^--precision-recipe {problem}"):
        hooks(names)


@pytest.mark.parametrize(
    "name",
    ["mxnorm", "fused_allreduce_norm", "quantized_param_gather", "quantized_expert_dispatch"],
)
def test_a_script_of_ones_own_gives_no_argument_of_recipes_without_one(name):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"^{flag} needs a recipe, such as bf16$"):
        hooks(None, **{name: True})


def test_local_experts_with_biases_are_trained_by_a_hook():
    assert hooks(None, num_experts=2) == [train_biases_of_experts]
    assert hooks(None, num_experts=2, add_bias_linear=False) == []


def check(recipe: list[str] | None, *overrides: str, **more: object) -> None:
    args = Namespace(**{**USUAL, "precision_recipe": recipe, **more})
    compatibility.check(args, recipe and load_recipes(recipe, overrides))


def given(flags: str, value: object = True) -> dict[str, dict[str, object]]:
    """Return the change of each flag that sets the attribute of its name to a value."""
    return {flag: {flag[2:].replace("-", "_"): value} for flag in flags.split()}


TE = {"transformer_impl": "transformer_engine"}
QUANTIZED = given("""
    --delay-wgrad-compute --overlap-dispatch-backward-with-experts-wgrad
    --use-transformer-engine-op-fuser --use-grouped-gemm-for-shared-expert
""") | {
    "--expert-tensor-parallel-num-weight-shards": {"expert_gtp_weight_remat_size": 2},
    "--fp8-format": {"fp8": "e4m3"},
    "--fp4-format": {"fp4": "e2m1"},
}  # fmt: skip
WINDOW = {"window_rotary_base": 10000}
FUSED = {
    "fused_allreduce_norm": True, "tensor_model_parallel_size": 2, "normalization": "RMSNorm",
    "add_bias_linear": False, "hidden_dropout": 0.0,
}  # fmt: skip
DISPATCH = TE | {
    "quantized_expert_dispatch": True, "expert_model_parallel_size": 2, "add_bias_linear": False,
    "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True, "num_experts": 4,
}  # fmt: skip
MASKS = TE | {"dataloader_inter_document_masking": True}
OVERLAPPED = {
    "overlap_moe_expert_parallel_comm": True, "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}  # fmt: skip
LATENT = {"multi_latent_attention": True}
YARN = {"position_embedding_type": "yarn"}
REFUSED = (
    (["nvfp4"], {}, "^{} under a recipe: ", QUANTIZED),
    (["mxfp8"], {"mxnorm": True, "normalization": "RMSNorm"}, "^--mxnorm {}", {
        "excludes --apply-layernorm-1p: ": {"layernorm_zero_centered_gamma": True},
        "needs --normalization RMSNorm$": {"normalization": "LayerNorm"},
    }),
    (None, {"reset_attention_mask": True}, "^--reset-attention-mask has no effect with {}", {
        "--transformer-impl transformer_engine": TE,
        "--masked-softmax-fusion": {"masked_softmax_fusion": True},
        "more than two pipeline stages": {"pipeline_model_parallel_size": 3},
        "more than two pipeline stages: ": {"virtual_pipeline_model_parallel_size": 2},
    }),
    (None, {}, "{}", {
        "window ignore the mask; omit": {"window_size": (4, 0), "reset_attention_mask": True},
        "size must be 1": LATENT | {"tensor_model_parallel_size": 2},
        "no biases; give --disable-bias-linear": {"num_experts": 2, "moe_grouped_gemm": True},
        "give --cuda-graph-impl transformer_engine": {"cuda_graph_impl": "local"},
        "omit the stages": {
            "cuda_graph_impl": "transformer_engine", "virtual_pipeline_model_parallel_size": 2,
        },
        "^--position-embedding-type relative: .*rope$": {"position_embedding_type": "relative"},
        "^--position-embedding-type mrope: ": {"position_embedding_type": "mrope"},
        "^--position-embedding-type yarn with --multi-latent.*--rope-type yarn$": YARN | LATENT,
        r"^--multi-latent-attention: --hybrid-layer-pattern M\*- has none; write \+ for":
            LATENT | {"hybrid_layer_pattern": "M*-"},
        "^--rotary-interleaved with --position-embedding-type yarn: ":
            YARN | {"rotary_interleaved": True},
        "^--rotary-percent with --position-embedding-type yarn: ": YARN | {"rotary_percent": 0.5},
        "needs --moe-grouped-gemm, ": {"moe_mlp_glu_interleave_size": 8, "num_experts": 2},
        "needs --use-grouped-gemm-for-shared-expert$":
            {"moe_shared_expert_glu_interleave_size": 8, "num_experts": 2},
        "^--recompute-modules mlp needs --disable-bias-linear: ":
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        "^--geglu: the model has another activation": {"geglu": True, "swiglu": True},
        "not go with --sandwich-norm": {"residual_multiplier": 0.5, "sandwich_norm": True},
        "needs --position-emb": WINDOW | {"position_embedding_type": "none"},
        "multi-latent-attention$": WINDOW | LATENT,
        "^--window-rotary-base needs --window-size$": WINDOW,
    }),
    (None, WINDOW | {"window_size": (4, 0)}, "^--sandwich-norm, .* exclude {}$", {
        "--transformer-impl transformer_engine": TE,
        "--hybrid-layer-pattern": {"hybrid_layer_pattern": "M*"},
        "--mtp-num-layers": {"mtp_num_layers": 1},
    }),
    (["bf16"], {}, "^--sandwich-norm, .* exclude {}$", {
        "--mxnorm": {"residual_multiplier": 0.5, "mxnorm": True},
        "--fused-allreduce-norm": {"sandwich_norm": True, "fused_allreduce_norm": True},
    }),
    (None, TE | {"use_megatron_fsdp": True}, "^{} with --use-megatron-fsdp: .* omit ", {
        "--async-save --async-strategy mcore": {"async_save": True, "async_strategy": "mcore"},
        "--pipeline-model-parallel-size above 1": {"pipeline_model_parallel_size": 2},
        "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    }),
    (["nvfp4"], MASKS, "^--dataloader-inter-document-masking needs {}", {
        "Transformer Engine layers": {"transformer_impl": "local"},
        "a GPT": {"hybrid_layer_pattern": "M*"},
        "--pad-documents-to-multiple-of 4": {"context_parallel_size": 2},
        "--pad-documents-to-multiple-of 8":
            {"context_parallel_size": 4, "pad_documents_to_multiple_of": 4},
        "--micro-batch-size 1 in a pipeline": {"pipeline_model_parallel_size": 2},
        "--cuda-graph-impl none": {"cuda_graph_impl": "local"},
        "a data set of documents": {"sft": True},
        "samples of whole documents": {"fim_data": True},
        "no --reset-position-ids": {"reset_position_ids": True},
    }),
    (None, OVERLAPPED, "{}", {
        "^--overlap-moe-expert-parallel-comm needs a GPT: ": {"hybrid_layer_pattern": "ME"},
        "above 1 needs --sequence-parallel$": {"sequence_parallel": False},
    }),
    (["bf16"], FUSED, "^--fused-allreduce-norm needs {}$", {
        "--tensor-model-parallel-size above 1": {"tensor_model_parallel_size": 1},
        "--transformer-impl local": TE,
        "a model without --sequence-parallel": {"sequence_parallel": True},
        "--normalization RMSNorm": {"normalization": "LayerNorm"},
        "--hidden-dropout 0": {"hidden_dropout": 0.1},
        "a model without --num-experts": {"num_experts": 2},
        "a model without --apply-layernorm-1p": {"layernorm_zero_centered_gamma": True},
        "a GPT": {"hybrid_layer_pattern": "M*"},
    }),
    (["fp8-tile"], DISPATCH, "^--quantized-expert-dispatch {}", {
        "needs --expert-model-parallel-size above 1": {"expert_model_parallel_size": 1},
        "needs --expert-tensor-parallel-size 1": {"expert_tensor_parallel_size": 2},
        "needs --moe-token-dispatcher-type alltoall": {"moe_token_dispatcher_type": "flex"},
        "needs --moe-grouped-gemm": {"moe_grouped_gemm": False},
        "needs --disable-bias-linear": {"add_bias_linear": True},
        "excludes --cuda-graph-impl: ": {"cuda_graph_impl": "full_iteration"},
        "excludes --log-quantization-error-interval: ": {"log_quantization_error_interval": 5},
    }),
    (["fp8-tile"], DISPATCH, "^--quantized-expert-dispatch excludes {}: ", given("""
        --moe-pad-expert-input-to-capacity --moe-apply-probs-on-input
        --fine-grained-activation-offloading --overlap-moe-expert-parallel-comm
    """)),
)  # fmt: skip
"""Recipe, arguments that go with it, and changes that do not, by the error in a template."""


@pytest.mark.parametrize(
    ("recipe", "usual", "error", "change"),
    [
        pytest.param(recipe, usual, template.format(error), change, id=template.format(error))
        for recipe, usual, template, changes in REFUSED
        for error, change in changes.items()
    ],
)
def test_what_does_not_go_together_is_refused(recipe, usual, error, change):
    check(recipe, **usual)
    with pytest.raises(UserError, match=error):
        check(recipe, **usual | change)


@pytest.mark.parametrize("change", QUANTIZED.values(), ids=QUANTIZED)
def test_a_recipe_that_quantizes_nothing_excludes_less(change):
    check(["bf16"], **change)


@pytest.mark.parametrize(
    "more",
    [
        MASKS | {"pipeline_model_parallel_size": 2, "micro_batch_size": 1},
        MASKS | {"context_parallel_size": 2, "pad_documents_to_multiple_of": 8},
        {"recompute_granularity": "full", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"],
         "add_bias_linear": False},
        LATENT | {"rope_type": "rope", "rotary_percent": 0.5, "yarn_beta_fast": 32,
                  "use_mup": True, "mup_attn_scale_power": 0.5, "q_lora_rank": 8},
        TE | LATENT | {"tensor_model_parallel_size": 2},
        TE | {"num_experts": 2, "moe_grouped_gemm": True},
        TE | {"cuda_graph_impl": "local"},
    ],
)  # fmt: skip
def test_what_goes_together(more):
    check(None, **more)


@pytest.mark.parametrize(
    ("flag", "change"),
    [
        ("--defer-embedding-wgrad-compute", {"defer_embedding_wgrad_compute": True}),
        ("--tensor-parallel-num-weight-shards", {"gtp_weight_remat_size": 2}),
    ],
)
def test_arguments_that_compute_the_output_layer_are_refused(flag, change):
    with pytest.raises(UserError, match=f"^{flag} does not go with a recipe's output_layer: "):
        check(["nvfp4"], "output_layer=fp8-tile", **change)
    check(["nvfp4"], **change)


def test_lengths_of_documents_divide_the_sequence():
    for multiple in (0, -4, 12, 64):
        with pytest.raises(UserError, match=f"of {multiple} must divide --seq-length 32"):
            check(None, **MASKS, pad_documents_to_multiple_of=multiple)
    flag = "--pad-documents-to-multiple-of 4 needs --dataloader-inter-document-masking"
    with pytest.raises(UserError, match=f"^{flag}$"):
        check(None, pad_documents_to_multiple_of=4)


@pytest.mark.parametrize(
    ("flag", "change"),
    {
        "--yarn-original-max-position-embeddings": {"yarn_original_max_position_embeddings": 8192},
        "--yarn-beta-fast": {"yarn_beta_fast": 16},
        "--yarn-beta-slow": {"yarn_beta_slow": 2},
        "--no-yarn-correction-range-round-to-int": {"yarn_correction_range_round_to_int": False},
        "--use-rope-scaling": {"use_rope_scaling": True},
        "--rotary-seq-len-interpolation-factor": {"rotary_seq_len_interpolation_factor": 2},
        "--no-rope-freq": {"no_rope_freq": [1]},
        "--rotary-percent and --rope-type yarn": {"rotary_percent": 0.5},
        "--mup-base-head-dim": {"mup_base_head_dim": 4.0},
        "--use-mup": {"use_mup": True},
    }.items(),
)
def test_latent_attention_refuses_what_it_ignores(flag, change):
    """Other attention has all of them."""
    check(None, **change)
    with pytest.raises(UserError, match=f"^{flag} with --multi-latent-attention"):
        check(None, **LATENT, **change)


# -- CUDA graphs -----------------------------------------------------------------------------------

GRAPHS = {**USUAL, "cuda_graph_impl": "local", "eval_precision": "recipe", "eval_iters": 10}
HYBRID = {"hybrid_layer_pattern": "ME*E"}
SWITCH = ["switches.heal={iteration: 4, to: bf16}"]
# TetraJet-v2's format has no kernels; with fixed signs nothing of a GPU's memory is read.
FRESH = [f"{gemm}.hadamard.signs=fresh" for gemm in ("dgrad", "wgrad")]


def check_graphs(recipe: str, overrides: list[str], **changes: object) -> None:
    args = Namespace(**{**GRAPHS, **changes})
    refuse(compatibility.cuda_graphs(args, load_recipe(recipe, overrides)))


@pytest.mark.parametrize(
    ("recipe", "overrides", "change", "reason"),
    [
        ("nvfp4", [], {"cuda_graph_impl": "full_iteration"}, "it replays as one; use local"),
        (
            "nvfp4", [],
            {"eval_precision": "bf16", "cuda_graph_modules": ["mamba", "moe_router"], **HYBRID},
            "use --eval-precision recipe",
        ),
        ("nvfp4", [], {"fused_allreduce_norm": True}, "--fused-allreduce-norm counts"),
        (
            "nvfp4", [], {"overlap_moe_expert_parallel_comm": True},
            "not with --overlap-moe-expert-parallel-comm",
        ),
        (
            "nvfp4", [], {"recompute_granularity": "selective", "pipeline_model_parallel_size": 2},
            "another microbatch's random keys",
        ),
        (
            "nvfp4", SWITCH, {"cuda_graph_impl": "transformer_engine"},
            "where the recipe switches; use local",
        ),
        (
            "nvfp4", SWITCH,
            {"cuda_graph_impl": "transformer_engine", "num_experts": 4, **HYBRID},
            "where the recipe switches; use local",
        ),
        (
            "nvfp4", SWITCH, {"cuda_graph_impl": "transformer_engine", "num_experts": 4},
            "where the recipe switches; use no switch",
        ),
        ("if4", FRESH[1:], {}, "fresh signs of a format without kernels"),
    ],
)  # fmt: skip
def test_what_cuda_graphs_refuse(recipe, overrides, change, reason):
    with pytest.raises(UserError, match=f"^--cuda-graph-impl .* under a recipe: .*{reason}"):
        check_graphs(recipe, overrides, **change)


def test_what_cuda_graphs_take():
    for name in ("nvfp4", "tetrajet2", "quartet2", "mxfp4-backward"):
        check_graphs(name, [])
    check_graphs("nvfp4", SWITCH)
    check_graphs("nvfp4", SWITCH, num_experts=4, **HYBRID)
    # Runs without evaluation need no precision for it.
    check_graphs("nvfp4", [], eval_precision="bf16", eval_iters=0)


EXPERTS = {
    **GRAPHS, "cuda_graph_impl": "transformer_engine", "num_experts": 4, "cuda_graph_modules": [],
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
PARTS = [CudaGraphModule.attn, CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess]
LOCAL, PADDED = {"cuda_graph_impl": "local"}, {"moe_router_padding_for_quantization": True}


def check_experts(**changes: object) -> None:
    refuse(compatibility.graphs_of_experts(Namespace(**EXPERTS | changes)))


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({}, "give --cuda-graph-modules attn moe_router moe_preprocess"),
        ({"cuda_graph_modules": ["full"]}, "give --cuda-graph-modules attn moe_router"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type alltoall"),
        (HYBRID | LOCAL, "give --cuda-graph-modules attn mamba moe_router moe_preprocess"),
        (LOCAL, "give --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router"),
        (LOCAL | {"cuda_graph_modules": PARTS}, "give --cuda-graph-impl transformer_engine"),
        (PADDED | {"cuda_graph_modules": PARTS}, "omit the padding"),
        (HYBRID | LOCAL | PADDED | {"cuda_graph_modules": PARTS[:2]}, "omit the padding"),
    ],
)
def test_graphs_that_a_dispatcher_would_wait_in_are_refused(changes, way_out):
    with pytest.raises(UserError, match=way_out):
        check_experts(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cuda_graph_modules": PARTS},
        HYBRID | LOCAL | {"cuda_graph_modules": PARTS},
        PADDED | {"cuda_graph_modules": PARTS[:2]},
        {"num_experts": None},
        {"cuda_graph_impl": "none"},
        {"moe_token_dispatcher_type": "flex"},
        {"moe_pad_expert_input_to_capacity": True},
    ],
)
def test_graphs_of_parts_and_of_padded_experts_are_taken(changes):
    check_experts(**changes)
