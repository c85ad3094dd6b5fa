"""Translation of Megatron-LM's arguments for a machine without CUDA.

Command lines written for GPUs then run on a CPU, with a smaller model. :func:`adapt_to_cpu` adds
the arguments of one table, and replaces or removes those of the other.
"""

from argparse import Namespace
from dataclasses import dataclass

from megatron_lowbit.command_line import GivenArguments

_ADDED: tuple[tuple[str, ...], ...] = (
    ("--distributed-backend", "gloo"),
    ("--transformer-impl", "local"),
    ("--use-cpu-initialization",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-persist-layer-norm",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-gelu-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    # Local attention is causal without a mask, which takes sequence * sequence values of memory.
    ("--no-create-attention-mask-in-dataloader",),
    # Reruns detect faults of GPUs and save the states of CUDA's random generators.
    ("--rerun-mode", "disabled"),
    ("--async-strategy", "mcore"),
)
"""Arguments to add unless the command line has them."""

_CONFLICTS = {"--no-create-attention-mask-in-dataloader": "--reset-attention-mask"}
"""Arguments of ``_ADDED`` that contradict another argument of the command line."""


@dataclass(frozen=True)
class _Row:
    """Argument that a CPU does not support.

    Attributes:
        flag: the argument.
        reason: clause for the printed line.
        values: unsupported values; empty for all.
        instead: tokens of the argument that replaces it; empty to remove it.
    """

    flag: str
    reason: str
    values: tuple[str | list[str], ...] = ()
    instead: tuple[str, ...] = ()


_TE = "it needs Transformer Engine, and that a GPU"
_GRAPH = "CUDA graphs need a GPU"
_FSDP = "Megatron FSDP and FSDP2 need a GPU"
_KERNEL = "its fused kernel needs a GPU"
_DISPATCH = "its dispatcher needs a GPU"
_WRITER = "the process that writes checkpoints beside training copies from a GPU"
_STREAMS = "it overlaps CUDA streams"
_OFFLOAD = "everything is in the CPU's memory already"
_FP32 = "a CPU computes in FP32, BF16 and FP16 are slow there"
_OPTIMIZER = "the precision-aware optimizer is Transformer Engine's"

_UNSUPPORTED = (
    _Row("--distributed-backend", "NCCL needs GPUs", ("nccl",), ("--distributed-backend", "gloo")),
    _Row(
        "--transformer-impl", _TE, ("transformer_engine", "inference_optimized"),
        ("--transformer-impl", "local"),
    ),
    _Row("--spec", _TE, (
        ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    )),
    _Row("--bf16", _FP32),
    _Row("--fp16", _FP32),
    _Row("--fp16-lm-cross-entropy", _FP32),
    _Row("--fp32-residual-connection", "residuals are FP32 without it"),
    _Row("--grad-reduce-in-bf16", "gradients are FP32 there, as the parameters are"),
    _Row(
        "--async-strategy", "nvidia-resiliency-ext copies from a GPU", ("nvrx",),
        ("--async-strategy", "mcore"),
    ),
    _Row("--async-save", _WRITER),
    _Row("--use-persistent-ckpt-worker", _WRITER),
    _Row(
        "--rerun-mode", "it looks for faults of GPUs", ("validate_results", "report_stats"),
        ("--rerun-mode", "disabled"),
    ),
    # Attention and fused kernels
    _Row("--attention-backend", _KERNEL, ("flash", "fused", "local")),
    _Row("--use-flash-attn", _KERNEL),
    _Row("--flash-attention-version", _KERNEL),
    _Row("--cross-entropy-loss-fusion", _KERNEL),
    _Row("--cross-entropy-fusion-impl", _KERNEL),
    _Row("--use-fused-weighted-squared-relu", _KERNEL),
    _Row("--fused-residual-rmsnorm", _TE),
    _Row("--use-te-activation-func", _TE),
    _Row("--use-transformer-engine-op-fuser", _TE),
    _Row("--te-rng-tracker", _TE),
    _Row("--log-max-attention-logit", _TE),
    _Row("--te-precision-config-file", _TE),
    _Row("--dsa-kernel-backend", _KERNEL, ("tilelang", "cudnn")),
    # CUDA graphs
    _Row("--cuda-graph-impl", _GRAPH, ("local", "transformer_engine", "full_iteration")),
    _Row("--cuda-graph-modules", _GRAPH),
    _Row("--cuda-graph-scope", _GRAPH),
    _Row("--cuda-graph-warmup-steps", _GRAPH),
    _Row("--inference-cuda-graph-scope", _GRAPH),
    _Row("--enable-cuda-graph", _GRAPH),
    _Row("--external-cuda-graph", _GRAPH),
    _Row("--optimizer-cuda-graph", _GRAPH),
    # Experts
    _Row("--moe-grouped-gemm", _KERNEL),
    _Row("--moe-permute-fusion", _KERNEL),
    _Row("--moe-router-fusion", _KERNEL),
    _Row(
        "--moe-token-dispatcher-type", _DISPATCH, ("flex",),
        ("--moe-token-dispatcher-type", "alltoall"),
    ),
    _Row("--moe-enable-deepep", _DISPATCH),
    _Row("--moe-flex-dispatcher-backend", _DISPATCH),
    _Row("--moe-flex-dispatcher-num-sms", _DISPATCH),
    _Row("--moe-deepep-num-sms", _DISPATCH),
    _Row("--moe-hybridep-num-sms", _DISPATCH),
    _Row("--moe-permute-fusion-into-hybridep", _DISPATCH),
    _Row("--moe-shared-expert-overlap", _STREAMS),
    _Row("--overlap-moe-expert-parallel-comm", _STREAMS),
    _Row("--overlap-dispatch-backward-with-experts-wgrad", _STREAMS),
    # Communication and scheduling
    _Row("--tp-comm-overlap", _TE),
    _Row("--delay-wgrad-compute", _TE),
    _Row("--defer-embedding-wgrad-compute", "it needs the fused accumulation of gradients"),
    _Row("--wgrad-deferral-limit", "it needs the fused accumulation of gradients"),
    _Row("--pipeline-model-parallel-comm-backend", "gloo is all there is"),
    _Row("--nccl-communicator-config-path", "NCCL needs GPUs"),
    _Row("--high-priority-stream-groups", "a CPU has no streams"),
    _Row("--use-nccl-ub", "NCCL needs GPUs"),
    _Row("--use-sharp", "NCCL needs GPUs"),
    # Sharded parameters
    _Row("--use-megatron-fsdp", _FSDP, (), ("--use-distributed-optimizer",)),
    _Row("--use-torch-fsdp2", _FSDP),
    _Row(
        "--ckpt-format", _FSDP, ("fsdp_dtensor", "torch_dcp"), ("--ckpt-format", "torch_dist"),
    ),
    _Row("--data-parallel-sharding-strategy", _FSDP),
    _Row("--outer-dp-sharding-strategy", _FSDP),
    _Row("--fsdp-double-buffer", _FSDP),
    _Row("--fsdp-manual-registration", _FSDP),
    _Row("--init-model-with-meta-device", _FSDP),
    # Memory and the optimizer
    _Row("--fine-grained-activation-offloading", _OFFLOAD),
    _Row("--offload-modules", _OFFLOAD),
    _Row("--delay-offload-until-cuda-graph", _OFFLOAD),
    _Row("--cpu-offloading-num-layers", _OFFLOAD),
    _Row("--optimizer-cpu-offload", _OFFLOAD),
    _Row("--use-precision-aware-optimizer", _OPTIMIZER),
    _Row("--main-grads-dtype", _OPTIMIZER),
    _Row("--main-params-dtype", _OPTIMIZER),
    _Row("--exp-avg-dtype", _OPTIMIZER),
    _Row("--exp-avg-sq-dtype", _OPTIMIZER),
    # Measurements of a GPU
    _Row("--gpu-sniff-test-interval", "there is no GPU to test"),
    _Row("--log-energy", "NVML measures GPUs"),
    _Row("--nvtx-ranges", "Nsight Systems shows them for GPUs"),
    _Row("--record-memory-history", "it records the CUDA allocator"),
)  # fmt: skip


def adapt_to_cpu(args: Namespace, given: GivenArguments) -> list[str]:
    """Change arguments to ones that a machine without CUDA supports.

    Args:
        args: parsed arguments.
        given: the same arguments as written on the command line; changed in place.

    Returns:
        Lines to print that explain each change.
    """
    changes = [_apply(row, args, given) for row in _UNSUPPORTED]
    lines = [f"on a CPU: {change}" for change in changes if change]
    missing = [
        argument
        for argument in _ADDED
        if argument[0] not in given
        and not (argument[0] in _CONFLICTS and _CONFLICTS[argument[0]] in given)
    ]
    for argument in missing:
        given.add(*argument)
    if missing:
        lines.append(f"on a CPU: added {' '.join(word for arg in missing for word in arg)}")
    return lines


def needs_one_connection(args: Namespace) -> bool:
    """Return True if Megatron-LM demands ``CUDA_DEVICE_MAX_CONNECTIONS=1``, even on a CPU."""
    return args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1


def _apply(row: _Row, args: Namespace, given: GivenArguments) -> str | None:
    """Replace or remove an unsupported argument; return a description of the change."""
    if row.flag not in given:
        return None
    text = given.text(row.flag)
    value = getattr(args, given.destination(row.flag))
    if row.values and getattr(value, "name", value) not in row.values:  # enums by their names
        return None
    given.remove(row.flag)
    if not row.instead:
        return f"left out {text}: {row.reason}"
    if row.instead[0] not in given:
        given.add(*row.instead)
    replaced = text.removeprefix(f"{row.instead[0]} ")
    return f"{' '.join(row.instead)} instead of {replaced}: {row.reason}"
