"""Workarounds for gaps and bugs of Megatron-LM 0.19.2 as packaged on PyPI.

docs/research/upstream-notes.md describes them. What no workaround helps is refused in
``compatibility.py``.
"""

import queue
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial, wraps
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from megatron_lowbit.arguments.parser import LOSSES
from megatron_lowbit.command_line import value_of
from megatron_lowbit.errors import error_behind
from megatron_lowbit.kernels.cublas import scaled_matmul
from megatron_lowbit.megatron.run.errors import say_on_rank_0
from megatron_lowbit.replaced import replaced


def use_prebuilt_dataset_helpers() -> None:
    """Disable the compilation of dataset helpers, of which the package has no Makefile."""
    from megatron.core.datasets import helpers_cpp, utils  # noqa: F401  checks that helpers exist

    utils.compile_helpers = lambda: None


def apply_ignored_arguments(model_config: Any, args: Namespace) -> Iterator[str]:
    """Apply arguments that Megatron-LM parses and then ignores to a model's configuration.

    Yields a line to print for each. ``gpt_config_from_args`` leaves ``--rope-scaling-factor`` at 8,
    hybrids do not scale at all, and rotate interleaved pairs by the angles of halves. No code reads
    ``--openai-gelu``: Megatron-LM computes the tanh approximation of GELU where it fuses bias and
    activation, and exact GELU elsewhere, such as on a CPU.
    """
    from megatron.core.transformer.utils import openai_gelu

    factor = getattr(model_config, "rope_scaling_factor", args.rope_scaling_factor)
    if args.use_rope_scaling and factor != args.rope_scaling_factor:
        model_config.rope_scaling_factor = args.rope_scaling_factor
        yield f"--rope-scaling-factor {args.rope_scaling_factor:g} applied: Megatron-LM ignores it"
    has_gelu = model_config.transformer.activation_func is torch.nn.functional.gelu
    if args.openai_gelu and not args.bias_gelu_fusion and has_gelu:
        model_config.transformer.activation_func = openai_gelu
        yield "--openai-gelu applied: Megatron-LM ignores it"
    is_hybrid = args.hybrid_layer_pattern is not None and not args.multi_latent_attention
    if is_hybrid and args.position_embedding_type == "rope":
        for flag in ("--use-rope-scaling", "--rotary-interleaved"):
            if value_of(args, flag):
                yield f"{flag} applied: Megatron-LM ignores it in hybrids"
        model_config.pre_wrap_hooks.append(partial(_complete_rotary_embeddings, args))


def _complete_rotary_embeddings(
    args: Namespace, chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Give the rotary embeddings of a hybrid's chunks the arguments that they lack."""
    for chunk in chunks:
        rotary: Any = chunk.rotary_pos_emb
        rotary.rotary_interleaved = args.rotary_interleaved
        if args.use_rope_scaling:
            rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, args.rope_scaling_factor)
    return chunks


def omit_profile_of_resumed_run(args: Namespace, iteration: int) -> None:
    """Print a line, and record no profile, if a run that continues after an iteration misses it.

    Torch's profiler counts from the first iteration of this run, and Megatron-LM stops it by the
    number of the iteration: such a run would end in a segmentation fault.
    """
    first, argument = args.profile_step_start, f"--profile-step-start {args.profile_step_start}"
    if args.use_pytorch_profiler:
        first, argument = 0, "--use-pytorch-profiler"
    if args.profile and iteration > first:
        args.profile = False
        say_on_rank_0(f"{argument}: without effect, the run continues after iteration {iteration}")


def count_iterations_of_samples(args: Namespace, iteration: int) -> None:
    """Let a run that continues after an iteration train the rest of ``--train-samples``.

    Megatron-LM divides all samples by this run's ``--global-batch-size``. After a change of it, the
    run would end too early, or need more samples than there are.
    """
    if args.train_samples and args.step_batch_size_schedule is None:
        left = (args.train_samples - args.consumed_train_samples) // args.global_batch_size
        iterations = iteration + max(0, left)
        if iterations != args.train_iters:
            args.train_iters = iterations
            samples = f"--train-samples {args.train_samples}"
            say_on_rank_0(f"{samples}: {left} iterations after iteration {iteration} are left")


@contextmanager
def load_what_is_not_saved(args: Namespace) -> Iterator[None]:
    """Let ``--no-save-optim`` and ``--no-save-rng`` affect only saves.

    Megatron-LM asks for the state to load by the function that collects the state to save.
    """
    with replaced(args, "no_save_optim", None), replaced(args, "no_save_rng", None):
        yield


@cache
def save_without_another_process() -> None:
    """Let synchronous saves return the sizes of their files by a queue of this process.

    Megatron-LM starts a process for this queue, which imports torch at the first save and remains
    where the run is killed. It returns only the class of a writer's error, to whose message this
    adds the file and the reason. Ctrl-C, which torch's writer turns into an error, stays Ctrl-C.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue = queue.Queue
    writer = filesystem_async.FileSystemWriterAsync
    upstream = writer.write_preloaded_data

    def write(*args: Any, write_bucket: Any, **kwargs: Any) -> Any:
        written = upstream(*args, write_bucket=write_bucket, **kwargs)
        if isinstance(error := written[1], Exception):
            if (interrupt := error_behind(error, KeyboardInterrupt)) is not None:
                raise interrupt
            # torch's writer in C++ hides the OSError behind an exception of its own.
            cause = error_behind(error, OSError)
            raise RuntimeError(f"{write_bucket[0]}: {cause.strerror if cause else error}")
        return written

    writer.write_preloaded_data = staticmethod(write)


@cache
def load_optimizers_of_other_expert_layouts() -> None:
    """Let the state of one optimizer load into separate ones for experts and the rest, and back.

    Megatron-LM has separate optimizers if experts are spread over ranks, or have a tensor-parallel
    size of their own. The tensors of a checkpoint have the same names in both cases.
    """
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    upstream = ChainedOptimizer.load_state_dict

    @wraps(upstream)
    def load(self: ChainedOptimizer, state: Any) -> None:
        # A number is the place of a separate optimizer, which an only optimizer does not have.
        if isinstance(state, dict) and len({isinstance(key, int) for key in state}) > 1:
            state = _as_in_this_layout(self.chained_optimizers, state)
        upstream(self, state)

    ChainedOptimizer.load_state_dict = load


def _as_in_this_layout(optimizers: list[Any], state: dict[Any, Any]) -> dict[Any, Any]:
    """Move what is saved without tensors to the optimizers of this run, which have the tensors.

    These are the groups of parameters, which ``resumed_schedule.py`` compares, and settings that
    all optimizers share, such as the number of steps.
    """
    from megatron.core.dist_checkpointing.dict_utils import merge
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    def identity(group: dict[str, Any]) -> list[Any]:
        ignored = ("max_lr", "min_lr", "is_expert_parallel")
        return [group.get(key) for key in param_group_identifier_keys if key not in ignored]

    whole = {key: value for key, value in state.items() if not isinstance(key, int)}
    separate = [state[number] for number in sorted(state.keys() - whole.keys())]
    loaded, saved = (separate, [whole]) if len(optimizers) > 1 else ([whole], separate)
    saved_groups = [group for each in saved for group in _inner(each)["param_groups"]]
    for optimizer, tensors in zip(optimizers, loaded, strict=True):
        settings = deepcopy(saved[0])
        _inner(settings)["param_groups"] = [
            group | {key: own[key] for key in ("params", "is_expert_parallel")}
            for own in optimizer.optimizer.state_dict()["param_groups"]
            for group in [g for g in saved_groups if identity(g) == identity(own)][:1]
        ]
        _inner(tensors).pop("param_groups", None)  # only the parameters' numbers
        merge(tensors, settings)
    return dict(enumerate(loaded)) if len(optimizers) > 1 else whole


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of torch's optimizer in the state of an optimizer of Megatron-LM."""
    inner: dict[str, Any] = state.get("optimizer", state)
    return inner


def hide_loss_from_second_parse() -> None:
    """Write ``native`` for this project's ``--cross-entropy-fusion-impl`` in ``sys.argv``.

    ``pretrain`` parses the command line again, for fault tolerance, with Megatron-LM's choices.
    """
    for index, (before, word) in enumerate(pairwise(["", *sys.argv])):
        flag, _, value = word.rpartition("=") if "=" in word else (before, "", word)
        if flag == "--cross-entropy-fusion-impl" and value in LOSSES:
            sys.argv[index] = word.removesuffix(value) + "native"


def train_biases_of_experts(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Let local experts with biases be trained; return the chunks.

    Megatron-LM adds a bias in place to the result of a reduction over one rank, which for autograd
    is a view; the layer skips that reduction here, as it does in expert parallelism. With sequence
    parallelism Megatron-LM sums the bias's gradient over the tensor-parallel ranks, which hold
    replicas of the expert and have summed it already.
    """
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, RowParallelLinear) and module.is_expert:
                module.explicit_expert_comm = True
                module.bias.sequence_parallel = False
    return chunks


@cache
def use_local_latent_attention() -> None:
    """Make local core attention accept the widths of multi-latent attention's keys and values."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    upstream = DotProductAttention.__init__

    @wraps(upstream)
    def init(
        self: DotProductAttention,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        upstream(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = init


@cache
def recompute_without_transformer_engine() -> None:
    """Let norms and activations be recomputed where Transformer Engine is not installed.

    Megatron-LM asks it for the state of its FP8 there, although nothing is in FP8.
    """
    from megatron.core.tensor_parallel import random

    if not random.HAVE_TE:
        upstream = random.CheckpointWithoutOutput.__init__
        random.CheckpointWithoutOutput.__init__ = lambda self, fp8=None: upstream(self, fp8=None)


def fuse_gradient_accumulation() -> None:
    """Compute what Apex's extension does for ``--gradient-accumulation-fusion``, by cuBLAS.

    The output layer needs it in models of Transformer Engine layers, too. Where Apex is installed,
    its extension stays.
    """
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_add_wgrad, wgrad_gemm_accum_fp16=_add_wgrad
        )
        layers._grad_accum_fusion_available = True


def _add_wgrad(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the product of grad (M, N), transposed, and x (M, K) to ``main_grad`` (N, K)."""
    if main_grad.dtype is torch.float32 and x.dtype is torch.bfloat16 and x.is_cuda:
        scaled_matmul(grad.t(), x.t(), None, torch.float32, out=main_grad)
    else:
        main_grad.add_(grad.t() @ x)


def use_torch_rms_norm() -> None:
    """Replace Apex's norm by torch's in models with RMSNorm, which Apex does not support."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    if "__new__" not in vars(FusedLayerNorm):  # The CPU runtime has replaced it already.
        FusedLayerNorm.__new__ = staticmethod(_norm_of)


def _norm_of(norm_class: type, config: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Build the norm of a configuration; without one, as when copying, an empty ``kind``."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if config is None or config.normalization == "LayerNorm":
        return object.__new__(norm_class)
    return WrappedTorchNorm(config, *args, **kwargs)


def use_zero_centered_norms() -> None:
    """Let local layers have ``--apply-layernorm-1p``, which their norms refuse, on a GPU, too."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_lowbit.cpu_runtime.megatron_patches import build_norm

    for norm in (WrappedTorchNorm, FusedLayerNorm):
        norm.__new__ = staticmethod(build_norm)
