"""Combinations of arguments and recipes that are refused, in one table.

Each function returns the rows of one feature: whether a combination is given, and the error that
names it and a way out. Training and dry runs read all of them by :func:`check`.
"""

from argparse import Namespace
from collections.abc import Iterable

from megatron_lowbit.arguments.parse import OF_GPUS
from megatron_lowbit.errors import require
from megatron_lowbit.recipes import Recipe

Rows = Iterable[tuple[object, str]]
"""Of each combination, whether it is given, and the error."""


def check(args: Namespace, recipe: Recipe | None) -> None:
    """Raise UserError for a combination that is refused.

    Args:
        args: parsed by Megatron-LM, with the arguments of ``add_recipe_arguments``. A dry run is
            checked as the machine that it describes.
        recipe: None without ``--precision-recipe``.
    """
    described = on_described_machine(args)
    refuse(attention_mask(described))
    refuse(local_layers(described))
    refuse(saves(args))
    refuse(gemma_layers(args))
    if recipe is None:
        return
    if any(precision.quantized for precision in recipe.precisions()):
        refuse(quantized_layers(args))
    refuse(cuda_graphs(described, recipe))
    refuse(mxnorm(args, recipe))
    refuse(oscillation(args, recipe))
    refuse(fused_allreduce_norm(args))
    refuse(quantized_param_gather(args))
    refuse(quantization_log(args))


def refuse(rows: Rows) -> None:
    """Raise a UserError with the error of the first combination that is given."""
    for given, error in rows:
        require(not given, error)


def on_described_machine(args: Namespace) -> Namespace:
    """Return the arguments as the machine that a dry run describes has them."""
    if not getattr(args, "dry_run", False):
        return args
    return Namespace(**vars(args) | {name: getattr(args, f"{name}_on_gpus") for name in OF_GPUS})


def attention_mask(args: Namespace) -> Rows:
    """Return runs whose layers ignore the mask of ``--reset-attention-mask``."""
    if not args.reset_attention_mask:
        return ()
    idle = "--reset-attention-mask has no effect with"
    stages = args.pipeline_model_parallel_size > 2 or args.virtual_pipeline_model_parallel_size
    return (
        (
            args.transformer_impl != "local",
            f"{idle} --transformer-impl {args.transformer_impl}: its causal layers make their own "
            "mask; give --transformer-impl local",
        ),
        (
            args.masked_softmax_fusion,
            f"{idle} --masked-softmax-fusion: the kernel makes its own mask; give "
            "--no-masked-softmax-fusion",
        ),
        (
            stages,
            f"{idle} more than two pipeline stages: Megatron-LM gives the mask to the first and "
            "the last",
        ),
    )


def local_layers(args: Namespace) -> Rows:
    """Return models that Megatron-LM's local layers do not train correctly."""
    if args.transformer_impl != "local":
        return ()
    pattern = args.hybrid_layer_pattern or ""
    virtual = args.virtual_pipeline_model_parallel_size is not None
    return (
        (
            args.multi_latent_attention and args.tensor_model_parallel_size > 1,
            "--multi-latent-attention with --transformer-impl local: Megatron-LM's gradient of the "
            "shared rotary key is wrong; --tensor-model-parallel-size must be 1",
        ),
        (
            {"D", "G"}.intersection(pattern),
            f"--hybrid-layer-pattern {pattern} with --transformer-impl local: D and G would be "
            "empty; they need Transformer Engine",
        ),
        (
            args.num_experts is not None and args.add_bias_linear and args.moe_grouped_gemm,
            "--moe-grouped-gemm with --transformer-impl local: grouped experts have no biases; "
            "give --disable-bias-linear, or leave it out",
        ),
        (
            args.window_size and args.reset_attention_mask,
            "--window-size with --reset-attention-mask and --transformer-impl local: Megatron-LM's "
            "layers with a window ignore the mask; leave out --reset-attention-mask",
        ),
        (
            args.cuda_graph_impl == "local",
            "--cuda-graph-impl local with --transformer-impl local: Megatron-LM reuses memory that "
            "torch's norms need in backward; give --cuda-graph-impl transformer_engine",
        ),
        (
            args.cuda_graph_impl == "transformer_engine" and virtual,
            "--cuda-graph-impl transformer_engine with --transformer-impl local: layers in virtual "
            "pipeline stages have other losses than without graphs; leave out the stages",
        ),
    )


def saves(args: Namespace) -> Rows:
    """Return saves that end the run."""
    mcore = args.async_save and args.async_strategy == "mcore"
    error = (
        "--async-save --async-strategy mcore with --use-megatron-fsdp: the first save ends in an "
        "error of Megatron-LM's; leave out --async-save"
    )
    return ((mcore and args.use_megatron_fsdp, error),)


def gemma_layers(args: Namespace) -> Rows:
    """Return models that exclude the parts of Gemma 3's layers."""
    yield (
        args.geglu and (args.swiglu or args.squared_relu or args.quick_geglu),
        "--geglu: the model has another activation already; give one of them",
    )
    if not (args.sandwich_norm or args.window_rotary_base):
        return
    for flag, given in (
        ("--transformer-impl transformer_engine", args.transformer_impl != "local"),
        ("--mxnorm", args.mxnorm),
        ("--fused-allreduce-norm", args.fused_allreduce_norm),
        ("--hybrid-layer-pattern", args.hybrid_layer_pattern is not None),
        ("--context-parallel-size above 1", args.context_parallel_size > 1),
    ):
        yield given, f"--sandwich-norm and --window-rotary-base do not go with {flag}"
    yield (
        args.window_rotary_base and args.position_embedding_type != "rope",
        "--window-rotary-base needs --position-embedding-type rope",
    )


def quantized_layers(args: Namespace) -> Rows:
    """Return arguments that would leave layers unquantized."""
    own = "a recipe takes the place of Megatron-LM's own"
    for flag, given, reason in (
        (
            "--overlap-moe-expert-parallel-comm", args.overlap_moe_expert_parallel_comm,
            "its schedule passes by the model's forward pass",
        ),
        (
            "--use-transformer-engine-op-fuser", args.use_transformer_engine_op_fuser,
            "its operations pass by the layers' forward pass",
        ),
        ("--fp8-format", args.fp8 is not None, own),
        ("--fp4-format", args.fp4 is not None, own),
        ("--fp16", vars(args).get("fp16"), "recipes quantize BF16 and FP32"),
    ):  # fmt: skip
        yield given, f"{flag} under a recipe: {reason}; leave it out"


def cuda_graphs(args: Namespace, recipe: Recipe) -> Rows:
    """Return uses of a recipe that the graphs of ``--cuda-graph-impl`` exclude."""
    implementation = args.cuda_graph_impl
    if implementation == "none" or not any(p.quantized for p in recipe.precisions()):
        return
    is_local, evaluates = implementation == "local", args.eval_iters or args.full_validation
    recomputes = args.recompute_granularity is not None and args.pipeline_model_parallel_size > 1
    for given, reason in (
        (
            implementation == "full_iteration",
            "random keys are filled in before each microbatch, which it replays as one; use local",
        ),
        (
            implementation == "transformer_engine" and recipe.switches,
            "it cannot capture again where the recipe switches; use local",
        ),
        (
            is_local and evaluates and args.eval_precision != "recipe",
            "it replays training's graphs in evaluation; use --eval-precision recipe",
        ),
        (
            is_local and recipe.switches and args.num_experts,
            "it cannot capture experts' layers again where the recipe switches; use no switch",
        ),
        (
            any(precision.reads_signs for precision in recipe.precisions()),
            "fresh signs of a format without kernels are drawn on the CPU; use signs: fixed",
        ),
        (args.fused_allreduce_norm, "--fused-allreduce-norm counts its calls on the CPU"),
        (recomputes, "recomputation in a pipeline would find another microbatch's random keys"),
    ):
        yield given, f"--cuda-graph-impl {implementation} under a recipe: {reason}"


def mxnorm(args: Namespace, recipe: Recipe) -> Rows:
    """Return recipes that MXNorm excludes."""
    falls_back = any(precision.falls_back for precision in recipe.precisions())
    return (
        (
            args.mxnorm and falls_back,
            "fallback: bf16 does not go with --mxnorm: its input is never whole",
        ),
    )


def oscillation(args: Namespace, recipe: Recipe) -> Rows:
    """Return arguments under which no rank has a layer's whole master weight."""
    if not recipe.oscillation:
        return
    tensor = args.tensor_model_parallel_size
    for flag, given in (
        ("--use-distributed-optimizer", args.use_distributed_optimizer),
        ("--use-megatron-fsdp", args.use_megatron_fsdp),
        ("--use-torch-fsdp2", args.use_torch_fsdp2),
        (f"--tensor-model-parallel-size {tensor}", tensor > 1),
        (f"--num-experts {args.num_experts}", args.num_experts),
    ):
        yield (
            given,
            f"{flag} does not go with a recipe's oscillation: each rank needs the whole FP32 "
            "weights of its layers",
        )


def fused_allreduce_norm(args: Namespace) -> Rows:
    """Return models with more than a norm between two linear layers of a block."""
    if not args.fused_allreduce_norm:
        return ()
    needs = {
        "--tensor-model-parallel-size above 1": args.tensor_model_parallel_size > 1,
        "--transformer-impl local": args.transformer_impl == "local",
        "--normalization RMSNorm": args.normalization == "RMSNorm" and not args.mxnorm,
        "--disable-bias-linear": not args.add_bias_linear,
        "--hidden-dropout 0": args.hidden_dropout == 0.0,
        "a model without --sequence-parallel": not args.sequence_parallel,
        "a model without --num-experts": args.num_experts is None,
        "a GPT": args.hybrid_layer_pattern is None,
    }
    missing = [name for name, holds in needs.items() if not holds]
    return ((missing, f"--fused-allreduce-norm needs {', '.join(missing)}"),)


def quantized_param_gather(args: Namespace) -> Rows:
    """Return arguments under which weights cannot be stored as codes."""
    flag = "--quantized-param-gather"
    if not args.quantized_param_gather:
        return
    for what, given in (
        (
            "--use-distributed-optimizer, which has the FP32 weights",
            args.use_distributed_optimizer,
        ),
        ("--bf16: without it the weights are the optimizer's own", args.bf16),
        ("--optimizer adam", args.optimizer == "adam"),
        ("--ckpt-format torch_dist", args.ckpt_format == "torch_dist"),
        (
            "--num-distributed-optimizer-instances 1",
            args.num_distributed_optimizer_instances == 1,
        ),
    ):
        yield not given, f"{flag} needs {what}"
    weight_hashes = args.check_weight_hash_across_dp_replicas_interval
    for other, given in (
        ("--use-megatron-fsdp", args.use_megatron_fsdp),
        ("--use-torch-fsdp2", args.use_torch_fsdp2),
        ("--optimizer-cpu-offload", args.optimizer_cpu_offload),
        (
            "--overlap-param-gather-with-optimizer-step",
            args.overlap_param_gather_with_optimizer_step,
        ),
        ("--cuda-graph-impl", args.cuda_graph_impl != "none"),
        ("--use-nccl-ub", args.nccl_ub),
        ("--moe-grouped-gemm", args.moe_grouped_gemm),
        ("--mxnorm", args.mxnorm),
        ("--skip-train", args.skip_train),
        ("--log-quantization-error-interval", args.log_quantization_error_interval),
        ("--save-params-interval", args.save_params_interval is not None),
        ("--check-weight-hash-across-dp-replicas-interval", weight_hashes is not None),
        ("--qk-clip", args.qk_clip),
    ):
        yield given, f"{flag} excludes {other}: leave one of them out"


def quantization_log(args: Namespace) -> Rows:
    """Return runs whose quantization errors cannot be logged."""
    name, interval = "--log-quantization-error-interval", args.log_quantization_error_interval
    written = args.save or args.tensorboard_dir or args.wandb_project
    return (
        (interval < 0, f"{name} {interval}: must not be negative"),
        (interval and not written, f"{name} needs --save, --tensorboard-dir or --wandb-project"),
        (
            interval and args.cuda_graph_impl != "none",
            f"{name} needs --cuda-graph-impl none: nothing is measured inside a CUDA graph",
        ),
    )
