"""Combinations of arguments and recipes that are refused, in one table.

Each function returns the rows of one subject: the error that names a combination and a way out, and
whether the combination is given. Training, dry runs and plans read all of them by :func:`check`.
"""

from argparse import Namespace

from megatron_lowbit.arguments.graph_compatibility import Rows, cuda_graphs, graphs_of_experts
from megatron_lowbit.arguments.layer_compatibility import (
    experts,
    gemma_layers,
    positions,
    recomputation,
)
from megatron_lowbit.arguments.parse import OF_RECIPES, check_without_recipe, on_described_machine
from megatron_lowbit.arguments.parser import LOSSES
from megatron_lowbit.command_line import value_of
from megatron_lowbit.errors import require
from megatron_lowbit.recipes import Recipe


def check(args: Namespace, recipe: Recipe | None) -> None:
    """Raise UserError for a combination that is refused.

    ``args`` are parsed by Megatron-LM, with the arguments of ``add_recipe_arguments``; a dry run is
    checked as the machine that it describes. ``recipe`` is None without ``--precision-recipe``.
    """
    args = on_described_machine(args)
    rows = [attention_mask(args), local_layers(args), fused_loss(args), graphs_of_experts(args)]
    rows += [megatron_fsdp(args), schedules(args), gemma_layers(args), document_masks(args)]
    rows += [layer_wise_optimizer(args), distillation(args), bad_iterations(args)]
    rows += [positions(args), recomputation(args), experts(args), pipeline(args)]
    if recipe is None:
        given = {flag for flag in OF_RECIPES if value_of(args, flag)}
        check_without_recipe(given)
    else:
        if any(precision.quantized for precision in recipe.precisions()):
            rows.append(quantized_layers(args))
        if recipe.takes_output_layer:
            rows.append(output_layer(args))
        rows += [cuda_graphs(args, recipe), mxnorm(args, recipe), oscillation(args, recipe)]
        rows += [fused_allreduce_norm(args), quantized_param_gather(args), quantization_log(args)]
        rows.append(quantized_expert_dispatch(args))
    for each in rows:
        refuse(each)


def refuse(rows: Rows) -> None:
    """Raise a UserError with the error of the first combination that is given."""
    for error, given in rows.items():
        require(not given, error)


def _rows(template: str, reasons: dict[str, tuple[str, object]]) -> Rows:
    """Return the rows of flags, each with a reason and whether it is given, by one template."""
    return {
        template.format(flag=flag, reason=reason): given
        for flag, (reason, given) in reasons.items()
    }


def attention_mask(args: Namespace) -> Rows:
    """Return runs whose layers ignore the mask of ``--reset-attention-mask``."""
    if not args.reset_attention_mask:
        return {}
    idle = "--reset-attention-mask has no effect with"
    stages = args.pipeline_model_parallel_size > 2 or args.virtual_pipeline_model_parallel_size
    return {
        f"{idle} --transformer-impl {args.transformer_impl}: its causal layers make their own mask;"
        " give --transformer-impl local": args.transformer_impl != "local",
        f"{idle} --masked-softmax-fusion: the kernel makes its own mask; give "
        "--no-masked-softmax-fusion": args.masked_softmax_fusion,
        f"{idle} more than two pipeline stages: Megatron-LM gives the mask to the first and the "
        "last": stages,
    }


def local_layers(args: Namespace) -> Rows:
    """Return models that Megatron-LM's local layers do not train correctly."""
    if args.transformer_impl != "local":
        return {}
    local, pattern = "with --transformer-impl local:", args.hybrid_layer_pattern or ""
    latent = args.multi_latent_attention and args.tensor_model_parallel_size > 1
    biases = args.num_experts is not None and args.add_bias_linear
    virtual = args.virtual_pipeline_model_parallel_size is not None
    windows = args.window_size and args.reset_attention_mask
    return {
        f"--context-parallel-size {args.context_parallel_size} {local} its attention divides no "
        "sequences; it must be 1": args.context_parallel_size > 1,
        f"--multi-latent-attention {local} Megatron-LM's gradient of the shared rotary key is "
        "wrong; --tensor-model-parallel-size must be 1": latent,
        f"--hybrid-layer-pattern {pattern} {local} D and G would be empty; they need Transformer "
        "Engine": {"D", "G"}.intersection(pattern),
        f"--moe-grouped-gemm {local} grouped experts have no biases; give --disable-bias-linear, "
        "or omit it": biases and args.moe_grouped_gemm,
        "--window-size with --reset-attention-mask and --transformer-impl local: Megatron-LM's "
        "layers with a window ignore the mask; omit --reset-attention-mask": windows,
        f"--cuda-graph-impl local {local} Megatron-LM reuses memory that torch's norms need in "
        "backward; give --cuda-graph-impl transformer_engine": args.cuda_graph_impl == "local",
        f"--cuda-graph-impl transformer_engine {local} layers in virtual pipeline stages have "
        "other losses than without graphs; omit the stages": (
            args.cuda_graph_impl == "transformer_engine" and virtual
        ),
    }


def fused_loss(args: Namespace) -> Rows:
    """Return an implementation of the fused loss without the argument that fuses it."""
    name, fuses = args.cross_entropy_fusion_impl, args.cross_entropy_loss_fusion
    error = f"--cross-entropy-fusion-impl {name} needs --cross-entropy-loss-fusion"
    return {error: name in LOSSES and not fuses}


def document_masks(args: Namespace) -> Rows:
    """Return arguments that exclude ``--dataloader-inter-document-masking`` or its padding."""
    flag, multiple = "--dataloader-inter-document-masking", args.pad_documents_to_multiple_of
    padding = f"--pad-documents-to-multiple-of {multiple}"
    if not args.dataloader_inter_document_masking:
        return {f"{padding} needs {flag}": multiple != 1}
    parts = 2 * args.context_parallel_size
    is_captured = args.cuda_graph_impl != "none"
    exchanges_batches = args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1
    reasons = {
        "Transformer Engine layers, and so a GPU": args.transformer_impl != "transformer_engine",
        "a GPT: Mamba layers carry states over documents": args.hybrid_layer_pattern is not None,
        f"--pad-documents-to-multiple-of {parts}, or a multiple of that: each rank has two equal "
        "parts of every document": parts > 2 and multiple > 0 and multiple % parts != 0,
        "--micro-batch-size 1 in a pipeline: stages exchange one sequence": exchanges_batches,
        "--cuda-graph-impl none: documents differ in every micro batch": is_captured,
        "a data set of documents; omit --sft": args.sft,
        "samples of whole documents; omit --fim-data": args.fim_data,
        "no --reset-position-ids, whose effect it has; omit it": args.reset_position_ids,
    }
    lengths = f"{padding} must divide --seq-length {args.seq_length}"
    return {
        **{f"{flag} needs {reason}": given for reason, given in reasons.items()},
        lengths: multiple < 1 or args.seq_length % multiple != 0,
    }


def pipeline(args: Namespace) -> Rows:
    """Return layouts in which two chunks of a stage have the embedding."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if not layout:
        return {}
    chunks = PipelineParallelLayerLayout(layout, stages).layout[0]
    return {
        f"--pipeline-model-parallel-layout {layout}: m cannot follow E in another chunk of the "
        "first stage, as Megatron-LM does not add the gradients of their embeddings": any(
            LayerType.mtp in chunk for chunk in chunks[1:]
        )
    }


def distillation(args: Namespace) -> Rows:
    """Return arguments that exclude ``--distill-from``."""
    if args.distill_from is None:
        return {}
    return _rows("{flag} with --distill-from: {reason}; omit one of them", {
        "--pipeline-model-parallel-size above 1": (
            "the teacher is not divided into stages", args.pipeline_model_parallel_size > 1
        ),
        "--mtp-num-layers": ("only the next token has a target", args.mtp_num_layers),
        "--mxnorm": ("the teacher would have its norms", args.mxnorm),
        "--fp8-format": ("the teacher would be quantized; name a recipe", args.fp8),
        "--fp4-format": ("the teacher would be quantized; name a recipe", args.fp4),
        "--cuda-graph-impl": ("the teacher is not captured", args.cuda_graph_impl != "none"),
        "--use-megatron-fsdp": ("the teacher is not divided", args.use_megatron_fsdp),
        "--use-torch-fsdp2": ("the teacher is not divided", args.use_torch_fsdp2),
        "--overlap-moe-expert-parallel-comm": (
            "its schedule passes by the teacher", args.overlap_moe_expert_parallel_comm
        ),
    })  # fmt: skip


def megatron_fsdp(args: Namespace) -> Rows:
    """Return arguments with which Megatron-FSDP ends the run."""
    if not args.use_megatron_fsdp:
        return {}
    return _rows("{flag} with --use-megatron-fsdp: {reason}", {
        "--async-save --async-strategy mcore": (
            "the first save ends in an error of Megatron-LM; omit --async-save",
            args.async_save and args.async_strategy == "mcore",
        ),
        "--pipeline-model-parallel-size above 1": (
            "its mesh of ranks has no pipeline stages; omit one of them",
            args.pipeline_model_parallel_size > 1,
        ),
        "--cuda-graph-impl": (
            "its hooks and parameters cannot be captured; omit one of them",
            args.cuda_graph_impl != "none",
        ),
    })  # fmt: skip


def schedules(args: Namespace) -> Rows:
    """Return models that ``--overlap-moe-expert-parallel-comm`` does not train."""
    flag = "--overlap-moe-expert-parallel-comm"
    if not args.overlap_moe_expert_parallel_comm:
        return {}
    splits = args.tensor_model_parallel_size > 1 and not args.sequence_parallel
    return {
        f"{flag} needs a GPT: Megatron-LM does not divide hybrids into communication and "
        "computation; omit it": args.hybrid_layer_pattern,
        # Megatron-LM refuses it in the forward pass that its schedule passes by.
        f"{flag} with --tensor-model-parallel-size above 1 needs --sequence-parallel": splits,
    }


def quantized_layers(args: Namespace) -> Rows:
    """Return arguments that would leave layers unquantized."""
    replaced = "a recipe takes the place of Megatron-LM's own"
    in_backward = "weight gradients are computed in the backward pass"
    return _rows("{flag} under a recipe: {reason}; omit it", {
        "--delay-wgrad-compute": (in_backward, args.delay_wgrad_compute),
        "--overlap-dispatch-backward-with-experts-wgrad": (
            in_backward, args.overlap_dispatch_backward_with_experts_wgrad
        ),
        "--expert-tensor-parallel-num-weight-shards": (
            "experts' weights must be whole", args.expert_gtp_weight_remat_size > 1
        ),
        "--use-transformer-engine-op-fuser": (
            "its operations pass by the layers' forward pass", args.use_transformer_engine_op_fuser
        ),
        "--use-grouped-gemm-for-shared-expert": (
            "its operations pass by the layers' forward pass",
            args.use_grouped_gemm_for_shared_expert,
        ),
        "--fp8-format": (replaced, args.fp8 is not None),
        "--fp4-format": (replaced, args.fp4 is not None),
        "--fp16": ("recipes quantize BF16 and FP32", vars(args).get("fp16")),
    })  # fmt: skip


def output_layer(args: Namespace) -> Rows:
    """Return arguments with which Megatron-LM computes the output layer's products itself."""
    shards = vars(args).get("gtp_weight_remat_size", 1)
    template = "{flag} does not go with a recipe's output_layer: {reason}; omit one of them"
    return _rows(template, {
        "--defer-embedding-wgrad-compute": (
            "its wgrad, after the last microbatch, is in BF16", args.defer_embedding_wgrad_compute
        ),
        "--tensor-parallel-num-weight-shards": ("its weight would not be whole", shards > 1),
    })  # fmt: skip


def mxnorm(args: Namespace, recipe: Recipe) -> Rows:
    """Return layers, norms and recipes that ``--mxnorm`` excludes."""
    if not args.mxnorm:
        return {}
    return {
        "fallback and hot_channels do not go with --mxnorm: its input is never whole": any(
            precision.keeps_sources for precision in recipe.precisions()
        ),
        "--mxnorm needs --transformer-impl local": args.transformer_impl != "local",
        "--mxnorm needs --normalization RMSNorm": args.normalization != "RMSNorm",
        "--mxnorm excludes --apply-layernorm-1p: its gains are w, not 1 + w; omit one of them": (
            args.layernorm_zero_centered_gamma
        ),
    }


def oscillation(args: Namespace, recipe: Recipe) -> Rows:
    """Return arguments under which no rank has a layer's whole master weight."""
    if not recipe.oscillation:
        return {}
    tensor, reason = args.tensor_model_parallel_size, "each rank needs the whole FP32 weights of"
    flags = {
        "--use-distributed-optimizer": args.use_distributed_optimizer,
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        f"--tensor-model-parallel-size {tensor}": tensor > 1,
        f"--num-experts {args.num_experts}": args.num_experts,
    }
    return {
        f"{flag} does not go with a recipe's oscillation: {reason} its layers": given
        for flag, given in flags.items()
    }


def fused_allreduce_norm(args: Namespace) -> Rows:
    """Return models with more than a norm between two linear layers of a block."""
    if not args.fused_allreduce_norm:
        return {}
    needs = {
        "--tensor-model-parallel-size above 1": args.tensor_model_parallel_size > 1,
        "--transformer-impl local": args.transformer_impl == "local",
        "--normalization RMSNorm": args.normalization == "RMSNorm" and not args.mxnorm,
        "--disable-bias-linear": not args.add_bias_linear,
        "--hidden-dropout 0": args.hidden_dropout == 0.0,
        "a model without --sequence-parallel": not args.sequence_parallel,
        "a model without --num-experts": args.num_experts is None,
        "a model without --apply-layernorm-1p": not args.layernorm_zero_centered_gamma,
        "a GPT": args.hybrid_layer_pattern is None,
    }
    missing = [name for name, holds in needs.items() if not holds]
    return {f"--fused-allreduce-norm needs {', '.join(missing)}": missing}


def layer_wise_optimizer(args: Namespace) -> Rows:
    """Return runs in FP32 of an optimizer that lacks a method which the training loop calls."""
    in_fp32 = args.use_layer_wise_distributed_optimizer and not args.bf16
    return {
        "--optimizer dist_muon, or muon with --use-distributed-optimizer, needs --bf16, which a "
        "CPU does not have: give --optimizer muon without that argument": in_fp32
    }


def quantized_param_gather(args: Namespace) -> Rows:
    """Return arguments under which weights cannot be stored as codes."""
    flag = "--quantized-param-gather"
    if not args.quantized_param_gather:
        return {}
    needs = {
        "--optimizer adam": args.optimizer == "adam",
        "--use-distributed-optimizer, which has the FP32 weights": args.use_distributed_optimizer,
        "--bf16: without it the weights are the optimizer's own": args.bf16,
        "--ckpt-format torch_dist": args.ckpt_format == "torch_dist",
        "--num-distributed-optimizer-instances 1": args.num_distributed_optimizer_instances == 1,
    }
    overlap = args.overlap_param_gather_with_optimizer_step
    hashes = args.check_weight_hash_across_dp_replicas_interval
    excludes = {
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--overlap-param-gather-with-optimizer-step": overlap,
        "--cuda-graph-impl": args.cuda_graph_impl != "none",
        "--use-nccl-ub": args.nccl_ub,
        "--moe-grouped-gemm": args.moe_grouped_gemm,
        "--mxnorm": args.mxnorm,
        "--skip-train": args.skip_train,
        "--log-quantization-error-interval": args.log_quantization_error_interval,
        "--save-params-interval": args.save_params_interval is not None,
        "--check-weight-hash-across-dp-replicas-interval": hashes is not None,
        "--qk-clip": args.qk_clip,
    }
    return _needs_and_excludes(flag, needs, excludes)


def _needs_and_excludes(flag: str, needs: Rows, excludes: Rows) -> Rows:
    return {f"{flag} needs {other}": not holds for other, holds in needs.items()} | {
        f"{flag} excludes {other}: omit one of them": given for other, given in excludes.items()
    }


def quantized_expert_dispatch(args: Namespace) -> Rows:
    """Return arguments under which experts' tokens cannot be sent as codes."""
    flag = "--quantized-expert-dispatch"
    if not args.quantized_expert_dispatch:
        return {}
    needs = {
        "--expert-model-parallel-size above 1": args.expert_model_parallel_size > 1,
        "--expert-tensor-parallel-size 1": args.expert_tensor_parallel_size in (None, 1),
        "--moe-token-dispatcher-type alltoall": args.moe_token_dispatcher_type == "alltoall",
        "--moe-grouped-gemm": args.moe_grouped_gemm,
        "--disable-bias-linear": not args.add_bias_linear,
    }
    excludes = {
        "--moe-pad-expert-input-to-capacity": args.moe_pad_expert_input_to_capacity,
        "--moe-apply-probs-on-input": args.moe_apply_probs_on_input,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        "--cuda-graph-impl": args.cuda_graph_impl != "none",
        "--log-quantization-error-interval": args.log_quantization_error_interval,
    }
    return _needs_and_excludes(flag, needs, excludes)


def quantization_log(args: Namespace) -> Rows:
    """Return runs whose quantization errors cannot be logged."""
    name, interval = "--log-quantization-error-interval", args.log_quantization_error_interval
    written = args.save or args.tensorboard_dir or args.wandb_project
    return {
        f"{name} {interval}: must not be negative": interval < 0,
        f"{name} needs --save, --tensorboard-dir or --wandb-project": interval and not written,
        f"{name} needs --cuda-graph-impl none: nothing is measured inside a CUDA graph": (
            interval and args.cuda_graph_impl != "none"
        ),
    }


def bad_iterations(args: Namespace) -> Rows:
    """Return arguments that allow no restart from a checkpoint (``--skip-bad-iterations``)."""
    if args.skip_bad_iterations is None:
        return {}
    option = f"--skip-bad-iterations {args.skip_bad_iterations}"
    return {
        f"{option}: must be positive": args.skip_bad_iterations <= 0,
        f"{option} needs --save and --load with the same folder": (
            args.save is None or args.save != args.load
        ),
        f"{option} needs loss and gradients checked": not args.check_for_nan_in_loss_and_grad,
        f"{option} needs --rerun-mode disabled: Megatron-LM's reruns would look for the same "
        "error": args.rerun_mode != "disabled",
    }
