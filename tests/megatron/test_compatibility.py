"""Arguments that training or a recipe refuses before the model is built."""

from argparse import Namespace

import pytest

from megatron_lowbit.arguments import compatibility, front_parser
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.recipe_hook import use_recipe
from megatron_lowbit.megatron.run.workarounds import train_biases_of_experts
from megatron_lowbit.recipes import load_recipe

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


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("defer_embedding_wgrad_compute", True, "--defer-embedding-wgrad-compute"),
        ("gtp_weight_remat_size", 2, "--tensor-parallel-num-weight-shards"),
    ],
)
def test_arguments_that_compute_the_output_layer_are_refused(name, value, flag):
    recipe = load_recipe("nvfp4", "output_layer=fp8-tile")
    args = Namespace(**{**USUAL, name: value})
    with pytest.raises(UserError, match=f"^{flag} does not go with a recipe's output_layer: "):
        compatibility.check(args, recipe)
    compatibility.check(args, load_recipe("nvfp4"))


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("delay_wgrad_compute", True, "--delay-wgrad-compute"),
        (
            "overlap_dispatch_backward_with_experts_wgrad", True,
            "--overlap-dispatch-backward-with-experts-wgrad",
        ),
        ("expert_gtp_weight_remat_size", 2, "--expert-tensor-parallel-num-weight-shards"),
        ("use_transformer_engine_op_fuser", True, "--use-transformer-engine-op-fuser"),
        ("use_grouped_gemm_for_shared_expert", True, "--use-grouped-gemm-for-shared-expert"),
        ("fp8", "e4m3", "--fp8-format"),
        ("fp4", "e2m1", "--fp4-format"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_a_quantizing_recipe_are_refused(name, value, flag):
    with pytest.raises(UserError, match=f"^{flag} under a recipe: "):
        hooks(["nvfp4"], **{name: value})
    assert len(hooks(["bf16"], **{name: value})) == 1


LATENT = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
EXPERTS = {"num_experts": 2, "moe_grouped_gemm": True}
WINDOW = {"window_size": (4, 0), "reset_attention_mask": True}
INTERLEAVED = {
    "cuda_graph_impl": "transformer_engine", "virtual_pipeline_model_parallel_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        (LATENT, "--tensor-model-parallel-size must be 1"),
        (EXPERTS, "grouped experts have no biases; give --disable-bias-linear"),
        (WINDOW, "omit --reset-attention-mask"),
        ({"cuda_graph_impl": "local"}, "give --cuda-graph-impl transformer_engine"),
        (INTERLEAVED, "omit the stages"),
    ],
)
@pytest.mark.parametrize("recipe", [None, ["nvfp4"]])
def test_local_layers_that_do_not_train_are_refused(recipe, model, needed):
    with pytest.raises(UserError, match=needed):
        hooks(recipe, **model)
    hooks(recipe, **{**model, "reset_attention_mask": False}, transformer_impl="transformer_engine")


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--async-save --async-strategy mcore", {"async_save": True, "async_strategy": "mcore"}),
        ("--pipeline-model-parallel-size above 1", {"pipeline_model_parallel_size": 2}),
        ("--cuda-graph-impl", {"cuda_graph_impl": "local"}),
    ],
)
def test_arguments_that_end_runs_of_megatron_fsdp_are_refused(flag, given):
    with pytest.raises(UserError, match=f"^{flag} with --use-megatron-fsdp: .* omit "):
        hooks(None, use_megatron_fsdp=True, transformer_impl="transformer_engine", **given)
    hooks(None, transformer_impl="transformer_engine", **given)


@pytest.mark.parametrize(
    ("needed", "given"),
    [
        ("Transformer Engine layers", {"transformer_impl": "local"}),
        ("a GPT", {"hybrid_layer_pattern": "M*"}),
        ("--pad-documents-to-multiple-of 4", {"context_parallel_size": 2}),
        (
            "--pad-documents-to-multiple-of 8",
            {"context_parallel_size": 4, "pad_documents_to_multiple_of": 4},
        ),
        ("--micro-batch-size 1 in a pipeline", {"pipeline_model_parallel_size": 2}),
        ("--cuda-graph-impl none", {"cuda_graph_impl": "local"}),
        ("a data set of documents", {"sft": True}),
        ("samples of whole documents", {"fim_data": True}),
        ("no --reset-position-ids", {"reset_position_ids": True}),
    ],
)
def test_masks_of_documents_say_what_they_need(needed, given):
    masks = {"dataloader_inter_document_masking": True, "transformer_impl": "transformer_engine"}
    hooks(["nvfp4"], **masks)
    hooks(["nvfp4"], **masks, pipeline_model_parallel_size=2, micro_batch_size=1)
    with pytest.raises(UserError, match=f"^--dataloader-inter-document-masking needs {needed}"):
        hooks(["nvfp4"], **{**masks, **given})


def test_lengths_of_documents_divide_the_sequence():
    masks = {"dataloader_inter_document_masking": True, "transformer_impl": "transformer_engine"}
    hooks(None, **masks, seq_length=32, context_parallel_size=2, pad_documents_to_multiple_of=8)
    for multiple in (0, -4, 12, 64):
        with pytest.raises(UserError, match=f"of {multiple} must divide --seq-length 32"):
            hooks(None, **masks, seq_length=32, pad_documents_to_multiple_of=multiple)
    flag = "--pad-documents-to-multiple-of 4 needs --dataloader-inter-document-masking"
    with pytest.raises(UserError, match=f"^{flag}$"):
        hooks(None, pad_documents_to_multiple_of=4)


@pytest.mark.parametrize("recipe", [None, ["nvfp4"]])
def test_overlapped_experts_say_what_they_need(recipe):
    overlapped = {"overlap_moe_expert_parallel_comm": True, "tensor_model_parallel_size": 2}
    split = {**overlapped, "sequence_parallel": True}
    hooks(recipe, **split)
    with pytest.raises(UserError, match=r"^--overlap-moe-expert-parallel-comm needs a GPT: "):
        hooks(recipe, **split, hybrid_layer_pattern="ME")
    with pytest.raises(UserError, match=r"above 1 needs --sequence-parallel$"):
        hooks(recipe, **overlapped)


FUSED = {
    "fused_allreduce_norm": True, "tensor_model_parallel_size": 2, "normalization": "RMSNorm",
    "add_bias_linear": False, "hidden_dropout": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("tensor_model_parallel_size", 1, "--tensor-model-parallel-size above 1"),
        ("transformer_impl", "transformer_engine", "--transformer-impl local"),
        ("sequence_parallel", True, "a model without --sequence-parallel"),
        ("normalization", "LayerNorm", "--normalization RMSNorm"),
        ("hidden_dropout", 0.1, "--hidden-dropout 0"),
        ("num_experts", 2, "a model without --num-experts"),
        ("layernorm_zero_centered_gamma", True, "a model without --apply-layernorm-1p"),
        ("hybrid_layer_pattern", "M*", "a GPT"),
    ],
)
def test_the_fused_all_reduce_says_what_it_needs(name, value, needed):
    assert len(hooks(["bf16"], **FUSED)) == 1
    with pytest.raises(UserError, match=f"^--fused-allreduce-norm needs {needed}$"):
        hooks(["bf16"], **{**FUSED, name: value})


def test_mxnorm_refuses_gains_of_1_plus_weight():
    args = Namespace(**{**USUAL, "mxnorm": True, "normalization": "RMSNorm"})
    recipe = load_recipe("mxfp8")
    compatibility.check(args, recipe)
    args.layernorm_zero_centered_gamma = True
    with pytest.raises(UserError, match=r"^--mxnorm excludes --apply-layernorm-1p: "):
        compatibility.check(args, recipe)


DISPATCH = {
    "quantized_expert_dispatch": True, "expert_model_parallel_size": 2, "add_bias_linear": False,
    "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True, "num_experts": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("expert_model_parallel_size", 1, "needs --expert-model-parallel-size above 1"),
        ("expert_tensor_parallel_size", 2, "needs --expert-tensor-parallel-size 1"),
        ("moe_token_dispatcher_type", "flex", "needs --moe-token-dispatcher-type alltoall"),
        ("moe_grouped_gemm", False, "needs --moe-grouped-gemm"),
        ("add_bias_linear", True, "needs --disable-bias-linear"),
        ("moe_pad_expert_input_to_capacity", True, "excludes --moe-pad-expert-input-to-capacity"),
        ("moe_apply_probs_on_input", True, "excludes --moe-apply-probs-on-input"),
        ("fine_grained_activation_offloading", True, "excludes --fine-grained-activation-off"),
        ("overlap_moe_expert_parallel_comm", True, "excludes --overlap-moe-expert-parallel-comm"),
        ("cuda_graph_impl", "transformer_engine", "excludes --cuda-graph-impl"),
        ("log_quantization_error_interval", 5, "excludes --log-quantization-error-interval"),
    ],
)
def test_what_sending_codes_to_experts_needs_and_excludes(name, value, reason):
    assert len(hooks(["fp8-tile"], **DISPATCH, transformer_impl="transformer_engine")) == 1
    args = Namespace(**{**USUAL, **DISPATCH, name: value})
    with pytest.raises(UserError, match=f"^--quantized-expert-dispatch {reason}"):
        compatibility.refuse(compatibility.quantized_expert_dispatch(args))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"geglu": True, "swiglu": True}, "--geglu: the model has another activation"),
        ({"sandwich_norm": True, "transformer_impl": "transformer_engine"}, "transformer_engine"),
        ({"sandwich_norm": True, "fused_allreduce_norm": True}, "--fused-allreduce-norm"),
        (
            {"residual_multiplier": 0.5, "mxnorm": True},
            "--residual-multiplier, .* exclude --mxnorm",
        ),
        ({"residual_multiplier": 0.5, "sandwich_norm": True}, "not go with --sandwich-norm"),
        ({"sandwich_norm": True, "mxnorm": True}, "--mxnorm"),
        ({"window_rotary_base": 10000, "context_parallel_size": 2}, "--context-parallel-size"),
        ({"window_rotary_base": 10000, "hybrid_layer_pattern": "M*"}, "--hybrid-layer-pattern"),
        ({"sandwich_norm": True, "mtp_num_layers": 1}, "exclude --mtp-num-layers"),
        ({"residual_multiplier": 0.5, "mtp_num_layers": 2}, "exclude --mtp-num-layers"),
        ({"window_rotary_base": 10000, "mtp_num_layers": 1}, "exclude --mtp-num-layers"),
        ({"window_rotary_base": 10000, "position_embedding_type": "none"}, "needs --position-emb"),
        ({"window_rotary_base": 10000, "multi_latent_attention": True}, "multi-latent-attention$"),
        ({"window_rotary_base": 10000}, "^--window-rotary-base needs --window-size$"),
    ],
)
def test_parts_of_gemma_that_do_not_go_together_are_refused(changes, named):
    compatibility.refuse(compatibility.gemma_layers(Namespace(**USUAL)))
    with pytest.raises(UserError, match=named):
        compatibility.refuse(compatibility.gemma_layers(Namespace(**USUAL | changes)))


# -- CUDA graphs -----------------------------------------------------------------------------------

GRAPHS = {**USUAL, "cuda_graph_impl": "local", "eval_precision": "recipe", "eval_iters": 10}
HYBRID = {"hybrid_layer_pattern": "ME*E"}
SWITCH = ["switches.heal={iteration: 4, to: bf16}"]
# TetraJet-v2's format has no kernels; with fixed signs nothing of a GPU's memory is read.
FRESH = [f"{gemm}.hadamard.signs=fresh" for gemm in ("dgrad", "wgrad")]


def check_graphs(recipe: str, overrides: list[str], **changes: object) -> None:
    args = Namespace(**{**GRAPHS, **changes})
    compatibility.refuse(compatibility.cuda_graphs(args, load_recipe(recipe, overrides)))


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
    compatibility.refuse(compatibility.graphs_of_experts(Namespace(**EXPERTS | changes)))


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


@pytest.mark.parametrize("recipe", [None, ["mxfp8"]])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position_embedding_type": "relative"}, "^--position-embedding-type relative: .*rope$"),
        ({"position_embedding_type": "mrope"}, "^--position-embedding-type mrope: "),
        (
            {"position_embedding_type": "yarn", "multi_latent_attention": True},
            "^--position-embedding-type yarn with --multi-latent-attention, .*--rope-type yarn$",
        ),
        (
            {"hybrid_layer_pattern": "M*-", "multi_latent_attention": True},
            r"^--multi-latent-attention: --hybrid-layer-pattern M\*- has none; write \+ for",
        ),
        (
            {"position_embedding_type": "yarn", "rotary_interleaved": True},
            "^--rotary-interleaved with --position-embedding-type yarn: ",
        ),
        (
            {"position_embedding_type": "yarn", "rotary_percent": 0.5},
            "^--rotary-percent with --position-embedding-type yarn: ",
        ),
        ({"moe_mlp_glu_interleave_size": 8, "num_experts": 2}, "needs --moe-grouped-gemm, "),
        (
            {"moe_shared_expert_glu_interleave_size": 8, "num_experts": 2},
            "needs --use-grouped-gemm-for-shared-expert$",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
            "^--recompute-modules mlp needs --disable-bias-linear: ",
        ),
    ],
)
def test_parts_that_a_layer_lacks_are_refused(changes, named, recipe):
    with pytest.raises(UserError, match=named):
        hooks(recipe, **changes)


def test_mlps_without_biases_are_recomputed():
    mlp = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    assert hooks(None, **mlp, add_bias_linear=False) == []
    assert hooks(None, **mlp | {"recompute_granularity": "full"}) == []


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("yarn_original_max_position_embeddings", 8192, "--yarn-original-max-position-embeddings"),
        ("yarn_beta_fast", 16, "--yarn-beta-fast"),
        ("yarn_beta_slow", 2, "--yarn-beta-slow"),
        ("yarn_correction_range_round_to_int", False, "--no-yarn-correction-range-round-to-int"),
        ("use_rope_scaling", True, "--use-rope-scaling"),
        ("rotary_seq_len_interpolation_factor", 2, "--rotary-seq-len-interpolation-factor"),
        ("no_rope_freq", [1], "--no-rope-freq"),
        ("rotary_percent", 0.5, "--rotary-percent and --rope-type yarn"),
        ("mup_base_head_dim", 4.0, "--mup-base-head-dim"),
        ("use_mup", True, "--use-mup"),
    ],
)
def test_latent_attention_refuses_what_it_ignores(name, value, flag):
    """Other attention has all of them."""
    hooks(None, **{name: value})
    with pytest.raises(UserError, match=f"^{flag} with --multi-latent-attention"):
        hooks(None, **{name: value}, multi_latent_attention=True)


def test_latent_attention_has_its_own_positions_and_scales():
    own = {"rope_type": "rope", "rotary_percent": 0.5, "yarn_beta_fast": 32}
    own |= {"use_mup": True, "mup_attn_scale_power": 0.5, "q_lora_rank": 8}
    assert hooks(None, **own, multi_latent_attention=True) == []
