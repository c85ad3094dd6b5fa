"""Translation of Megatron-LM's arguments for a machine without CUDA.

Command lines written for GPUs then run on a CPU, with a smaller model. :func:`adapt_to_cpu` adds
the arguments of one table, and replaces or removes the arguments of the other.
"""

from argparse import Namespace
from typing import NamedTuple

from megatron_lowbit.command_line import CommandLine

_ADDED: tuple[tuple[str, ...], ...] = (
    ("--distributed-backend", "gloo"),
    ("--transformer-impl", "local"),
    ("--use-cpu-initialization",),
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

_CONFLICTS = {
    "--no-create-attention-mask-in-dataloader": "--reset-attention-mask",
    "--no-bias-swiglu-fusion": "--activation-func-fp8-input-store",
}
"""Arguments of ``_ADDED`` that contradict another argument of the command line."""


class _Row(NamedTuple):
    """Argument that a CPU does not support."""

    flag: str
    reason: str
    values: tuple[str | list[str], ...] = ()  # unsupported ones; empty for all
    instead: tuple[str, ...] = ()  # the argument that replaces it; empty for one of _ADDED or none


_TE = "it needs Transformer Engine, and that a GPU"
_KERNEL = "its fused kernel needs a GPU"
_GRAPH = "CUDA graphs need a GPU"
_DISPATCH = "its dispatcher needs a GPU"
_FSDP = "Megatron FSDP and FSDP2 need a GPU"
_NCCL = "NCCL needs GPUs"
_HYBRID_LAYERS = (
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
)

_REPLACED = (
    _Row("--distributed-backend", _NCCL, ("nccl",)),
    _Row("--transformer-impl", _TE, ("transformer_engine", "inference_optimized")),
    _Row("--spec", _TE, _HYBRID_LAYERS),
    _Row("--async-strategy", "nvidia-resiliency-ext copies from a GPU", ("nvrx",)),
    _Row("--rerun-mode", "it looks for faults of GPUs", ("validate_results", "report_stats")),
    _Row("--attention-backend", _KERNEL, ("flash", "fused", "local")),
    _Row("--dsa-kernel-backend", _KERNEL, ("tilelang", "cudnn")),
    _Row("--cuda-graph-impl", _GRAPH, ("local", "transformer_engine", "full_iteration")),
    _Row("--moe-token-dispatcher-type", _DISPATCH, ("flex",),
         ("--moe-token-dispatcher-type", "alltoall")),
    _Row("--use-megatron-fsdp", _FSDP, (), ("--use-distributed-optimizer",)),
    _Row("--ckpt-format", _FSDP, ("fsdp_dtensor", "torch_dcp"), ("--ckpt-format", "torch_dist")),
)  # fmt: skip
"""Arguments that are replaced, or of which a CPU supports some values."""

_REMOVED = {
    "a CPU computes in FP32, BF16 and FP16 are slow there": "--bf16 --fp16 --fp16-lm-cross-entropy",
    "residuals are FP32 without it": "--fp32-residual-connection",
    "gradients are FP32 there, as the parameters are": "--grad-reduce-in-bf16",
    "the process that writes checkpoints during training copies from a GPU":
        "--async-save --use-persistent-ckpt-worker",
    _KERNEL: """
        --use-flash-attn --flash-attention-version --cross-entropy-loss-fusion
        --cross-entropy-fusion-impl --use-fused-weighted-squared-relu
        --moe-permute-fusion --moe-router-fusion
    """,
    _TE: """
        --fused-residual-rmsnorm --use-te-activation-func --use-transformer-engine-op-fuser
        --te-rng-tracker --log-max-attention-logit --te-precision-config-file
        --tp-comm-overlap --delay-wgrad-compute
        --use-grouped-gemm-for-shared-expert --moe-shared-expert-glu-interleave-size
    """,
    _GRAPH: """
        --cuda-graph-modules --cuda-graph-scope --cuda-graph-warmup-steps
        --inference-cuda-graph-scope --enable-cuda-graph --external-cuda-graph
        --optimizer-cuda-graph
    """,
    _DISPATCH: """
        --moe-enable-deepep --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms
        --moe-deepep-num-sms --moe-hybridep-num-sms --moe-permute-fusion-into-hybridep
    """,
    "it overlaps CUDA streams": """
        --moe-shared-expert-overlap --overlap-dispatch-backward-with-experts-wgrad
    """,
    "torch's scan has one method, and states in FP32":
        "--disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype",
    "it needs the fused accumulation of gradients":
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit",
    "only gloo is available": "--pipeline-model-parallel-comm-backend",
    _NCCL: "--nccl-communicator-config-path --use-nccl-ub --use-sharp",
    "a CPU has no streams": "--high-priority-stream-groups",
    _FSDP: """
        --use-torch-fsdp2 --data-parallel-sharding-strategy --outer-dp-sharding-strategy
        --fsdp-double-buffer --fsdp-manual-registration --init-model-with-meta-device
    """,
    "everything is in the CPU's memory already": """
        --fine-grained-activation-offloading --offload-modules --delay-offload-until-cuda-graph
        --cpu-offloading-num-layers --optimizer-cpu-offload
    """,
    "the precision-aware optimizer is Transformer Engine's": """
        --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype
        --exp-avg-sq-dtype
    """,
    "there is no GPU to test": "--gpu-sniff-test-interval",
    "NVML measures GPUs": "--log-energy --log-device-memory-used",
    "Nsight Systems shows them for GPUs": "--nvtx-ranges",
    "Nsight Systems needs a GPU, --use-pytorch-profiler does not": "--profile",
    "it records the CUDA allocator": "--record-memory-history",
}  # fmt: skip
"""Arguments that are removed, by the reason."""

_UNSUPPORTED = (
    *_REPLACED,
    *(_Row(flag, reason) for reason, flags in _REMOVED.items() for flag in flags.split()),
)


def adapt_to_cpu(args: Namespace, words: CommandLine) -> list[str]:
    """Change ``words``, the arguments as written, to ones that a machine without CUDA supports.

    ``args`` are the same arguments, parsed. Returns lines to print that explain each change.
    """
    # Weights that are stored quantized are rounded to BF16 first, and torch profiles a CPU as well.
    needed = {"--bf16": args.quantized_param_gather, "--profile": args.use_pytorch_profiler}
    changes = [_apply(row, args, words) for row in _UNSUPPORTED if not needed.get(row.flag)]
    lines = [f"on a CPU: {change}" for change in changes if change]
    added = []
    for flag, *value in _ADDED:
        if flag not in words and _CONFLICTS.get(flag, flag) not in words:
            words.add(flag, *value)
            added += [flag, *value]
    if added:
        lines.append(f"on a CPU: added {' '.join(added)}")
    return lines


def _apply(row: _Row, args: Namespace, words: CommandLine) -> str | None:
    """Replace or remove an unsupported argument; return a description of the change."""
    if row.flag not in words:
        return None
    text = words.text(row.flag)
    value = getattr(args, words.destination(row.flag))
    if row.values and getattr(value, "name", value) not in row.values:  # enums by their names
        return None
    words.remove(row.flag)
    instead = row.instead or next((added for added in _ADDED if added[0] == row.flag), ())
    if not instead:
        return f"ignored {text}: {row.reason}"
    if instead[0] not in words:
        words.add(*instead)
    replaced = text.removeprefix(f"{instead[0]} ")
    return f"{' '.join(instead)} instead of {replaced}: {row.reason}"
