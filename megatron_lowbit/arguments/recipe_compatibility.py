"""Arguments that the quantized layers of a recipe exclude, as rows of ``compatibility.py``."""

from argparse import Namespace

from megatron_lowbit.arguments.rows import Rows, excluded
from megatron_lowbit.command_line import CommandLine
from megatron_lowbit.errors import require
from megatron_lowbit.recipes import Recipe

OF_RECIPES = (
    "--mxnorm", "--fused-allreduce-norm", "--quantized-param-gather", "--quantized-expert-dispatch",
)  # fmt: skip
"""Arguments that only the layers of a recipe read."""


def check_without_recipe(given: CommandLine | set[str]) -> None:
    """Raise UserError for arguments of recipes among those given without a recipe."""
    for flag in OF_RECIPES:
        require(flag not in given, f"{flag} needs a recipe, such as bf16")


def of_recipe(args: Namespace, recipe: Recipe) -> list[Rows]:
    """Return the tables of all arguments that a recipe excludes, except CUDA graphs."""
    rows = [mxnorm(args, recipe), oscillation(args, recipe), fused_allreduce_norm(args)]
    rows += [quantized_param_gather(args), quantized_expert_dispatch(args), quantization_log(args)]
    if any(precision.quantized for precision in recipe.precisions()):
        rows.append(quantized_layers(args))
    return [*rows, output_layer(args)] if recipe.takes_output_layer else rows


def quantized_layers(args: Namespace) -> Rows:
    """Return arguments that would leave layers unquantized."""
    return {
        "--expert-tensor-parallel-num-weight-shards under a recipe: experts' weights must be "
        "whole; omit it": args.expert_gtp_weight_remat_size > 1,
    } | excluded(args, "{flag} under a recipe: {reason}; omit it", {
        "weight gradients are computed in the backward pass":
            "--delay-wgrad-compute, --overlap-dispatch-backward-with-experts-wgrad",
        "its operations pass by the layers' forward pass":
            "--use-transformer-engine-op-fuser, --use-grouped-gemm-for-shared-expert",
        "a recipe takes the place of Megatron-LM's own": "--fp8-format, --fp4-format",
        "recipes quantize BF16 and FP32": "--fp16",
    })  # fmt: skip


def output_layer(args: Namespace) -> Rows:
    """Return arguments with which Megatron-LM computes the output layer's products itself."""
    excludes = "does not go with a recipe's output_layer:"
    return {
        f"--defer-embedding-wgrad-compute {excludes} its wgrad, after the last microbatch, is in "
        "BF16; omit one of them": args.defer_embedding_wgrad_compute,
        f"--tensor-parallel-num-weight-shards {excludes} its weight would not be whole; omit one "
        "of them": vars(args).get("gtp_weight_remat_size", 1) > 1,
    }


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
    return excluded(args, "{flag} does not go with a recipe's oscillation: {reason}", {
        "each rank needs the whole FP32 weights of its layers":
            "--use-distributed-optimizer, --use-megatron-fsdp, --use-torch-fsdp2, "
            "--tensor-model-parallel-size above 1, --num-experts",
    })  # fmt: skip


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


def quantized_param_gather(args: Namespace) -> Rows:
    """Return arguments under which weights cannot be stored as codes."""
    if not args.quantized_param_gather:
        return {}
    needs = {
        "--optimizer adam": args.optimizer == "adam",
        "--use-distributed-optimizer, which has the FP32 weights": args.use_distributed_optimizer,
        "--bf16: without it the weights are the optimizer's own": args.bf16,
        "--ckpt-format torch_dist": args.ckpt_format == "torch_dist",
        "--num-distributed-optimizer-instances 1": args.num_distributed_optimizer_instances == 1,
    }
    return _needs_and_excludes(args, "--quantized-param-gather", needs, """
        --use-megatron-fsdp --use-torch-fsdp2 --optimizer-cpu-offload --cuda-graph-impl
        --overlap-param-gather-with-optimizer-step --use-nccl-ub --moe-grouped-gemm --mxnorm
        --skip-train --log-quantization-error-interval --save-params-interval --qk-clip
        --check-weight-hash-across-dp-replicas-interval
    """)  # fmt: skip


def quantized_expert_dispatch(args: Namespace) -> Rows:
    """Return arguments under which experts' tokens cannot be sent as codes."""
    if not args.quantized_expert_dispatch:
        return {}
    needs = {
        "--expert-model-parallel-size above 1": args.expert_model_parallel_size > 1,
        "--expert-tensor-parallel-size 1": args.expert_tensor_parallel_size in (None, 1),
        "--moe-token-dispatcher-type alltoall": args.moe_token_dispatcher_type == "alltoall",
        "--moe-grouped-gemm": args.moe_grouped_gemm,
        "--disable-bias-linear": not args.add_bias_linear,
    }
    return _needs_and_excludes(args, "--quantized-expert-dispatch", needs, """
        --moe-pad-expert-input-to-capacity --moe-apply-probs-on-input --cuda-graph-impl
        --fine-grained-activation-offloading --overlap-moe-expert-parallel-comm
        --log-quantization-error-interval
    """)  # fmt: skip


def _needs_and_excludes(args: Namespace, flag: str, needs: Rows, excludes: str) -> Rows:
    """Return rows of what a flag needs, and of the flags that it excludes."""
    return {f"{flag} needs {other}": not holds for other, holds in needs.items()} | excluded(
        args,
        f"{flag} excludes {{flag}}: {{reason}}",
        {"omit one of them": ", ".join(excludes.split())},
    )


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
