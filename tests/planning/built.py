"""Plans of arguments, and real models of one rank of any layout, which Megatron-LM builds here.

Its other ranks are torch's fake process group: collectives return without them, so that shapes and
sizes are right and numbers are not.
"""

import shlex
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from megatron_lowbit.layers.autograd_state import flatten
from megatron_lowbit.megatron.layers.state import layer_states
from megatron_lowbit.megatron.recipe_hook import model_config_of
from megatron_lowbit.megatron.run.dry_run import build, count_parameters, rank_of_stage
from megatron_lowbit.planning.device import Device
from megatron_lowbit.planning.estimate import Estimate
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import layout_of
from megatron_lowbit.planning.search import plan
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import load_recipes

# isort: split
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA_8B = f"@{EXAMPLES}/llama3-8b.args --vocab-size 128256"
ON_A_CPU = """
    --micro-batch-size 1 --transformer-impl local --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-rope-fusion --hidden-dropout 0 --attention-dropout 0 --distributed-backend gloo
    --quantization-engine reference
"""


def words(text: str) -> list[str]:
    """Split arguments; @NAME is a preset."""
    return [f"@{EXAMPLES / word[1:]}.args" if word[0] == "@" else word for word in text.split()]


def planned(
    words: str | Sequence[str], gpus: int = 1, gpu_name: str = "h200", vocabulary: int = 128256,
    **device,
) -> Estimate:  # fmt: skip
    """Estimate the layout that training's arguments ask for, in Transformer Engine layers."""
    words = shlex.split(words) if isinstance(words, str) else words
    args = TrainingArguments(words).parse(gpus)
    recipe = load_recipes(args.precision_recipe, args.recipe_set)
    (estimate,) = plan(
        [(layout_of(args, gpus), args)], recipe, vocabulary, Device(gpu(gpu_name), **device)
    )
    return estimate


def parse(text: str, ranks: int | None = None) -> Namespace:
    """Return training's arguments for a model that a CPU can build.

    Without a number of ranks there are as many as the layout needs.
    """
    training = TrainingArguments([*ON_A_CPU.split(), *words(text)])
    if ranks is None:
        flags = training.flags
        tensor, expert = flags.tensor_model_parallel_size, flags.expert_model_parallel_size
        ranks = tensor * expert * flags.pipeline_model_parallel_size
    training.remove("--global-batch-size")
    return training.parse(ranks)


def parameter_count(args: Namespace, vocabulary: int, stage: int = 0) -> int:
    """Count the parameters of a rank, which take no memory."""
    args = Namespace(**vars(args) | {"padded_vocab_size": vocabulary})
    with rank_of_stage(args, stage):
        _, chunks = build(args)
        return count_parameters(args, chunks).rank


def state_bytes(args: Namespace, vocabulary: int, replicas: int) -> dict[str, int]:
    """Return bytes of a rank's weights, main gradients and optimizer after a step, in BF16."""
    args = Namespace(**vars(args) | {"padded_vocab_size": vocabulary})
    with rank_of_stage(args, 0, replicas):
        config = model_config_of(args)
        builder = config.get_builder_cls()(config)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model = builder.build_distributed_models(groups, get_megatron_ddp_config(args))
        settings, overrides = get_megatron_optimizer_config(args)
        optimizer = get_megatron_optimizer(settings, model, overrides, False)
        model[0].zero_grad_buffer()
        for group in optimizer.param_groups:
            group["lr"] = 1.0
        optimizer.step()
        parameters = list(model[0].parameters())
        states = []
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for main in (p for group in part.optimizer.param_groups for p in group["params"]):
                moments = (part.optimizer.state[main][key] for key in ("exp_avg", "exp_avg_sq"))
                states += [main, *moments]
        gradients = [p.main_grad for p in parameters]
        tensors = {"weights": parameters, "main gradients": gradients, "optimizer": states}
        return {name: sum(_storages(of_name).values()) for name, of_name in tensors.items()}


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


class _FusedRMSNorm(torch.autograd.Function):
    """Stand-in that keeps what a fused RMSNorm does on a GPU (derivatives.yaml)."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale)
        return (x.float() * scale).to(x.dtype) * weight


class _FusedRope(torch.autograd.Function):
    """Stand-in for Transformer Engine's RoPE, which keeps nothing of its input."""

    @staticmethod
    def forward(ctx, t, freqs, interleaved=False):
        return t.clone()


class _FusedAttention(torch.autograd.Function):
    """Stand-in that keeps operands, result, a sum a head, as Transformer Engine does."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = query.clone()  # Numbers: free memory may have NaN, by which no router chooses.
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        operands = (query.contiguous(), key.contiguous(), value.contiguous())
        ctx.save_for_backward(*operands, output, sums)
        return output


def _attention(self, query, key, value, *_, **__):
    return _FusedAttention.apply(query, key, value).flatten(-2)


class Saved(dict):
    """Bytes of the storages that forward saved, by address; ``weights`` of the cached ones."""

    weights = 0


def saved_bytes(
    args: Namespace, vocabulary: int, monkeypatch, fused_attention: bool = True
) -> Saved:
    """Return the tensors that forward saves, each storage once, without parameters, by address.

    The model computes in BF16 and, where a GPU has a fused kernel, keeps what that keeps.
    """
    monkeypatch.setattr(
        rope_utils, "fused_apply_rotary_pos_emb", lambda *t, **_: _FusedRope.apply(*t)
    )
    monkeypatch.setattr(torch.nn.functional, "rms_norm", _FusedRMSNorm.apply)
    if fused_attention:
        monkeypatch.setattr(DotProductAttention, "forward", _attention)
    args = Namespace(**vars(args) | {"padded_vocab_size": vocabulary})
    with rank_of_stage(args, 0), torch.compiler.set_stance("force_eager"):
        config = model_config_of(args)
        fused = config.transformer
        fused.apply_rope_fusion = args.position_embedding_type == "rope"
        fused.bias_activation_fusion = fused.bias_dropout_fusion = True
        if args.squared_relu or args.quick_geglu:
            fused.bias_activation_fusion = False
        builder = config.get_builder_cls()(config)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
        ignored = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved, alive = Saved(), []

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in ignored and storage.nbytes():
                saved[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # or another would get its address
            return tensor

        shape = args.micro_batch_size, args.seq_length
        tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
        positions = torch.arange(args.seq_length).expand(shape)
        size = args.micro_batch_size
        destroy_num_microbatches_calculator()
        init_num_microbatches_calculator(0, None, size, size, 1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, positions, attention_mask=None, labels=tokens)
        destroy_num_microbatches_calculator()  # a later run in this process makes its own
        cached: list[torch.Tensor] = []
        for state in layer_states([model]):
            for operand in state.weight_cache.operands or ():
                flatten(operand, cached)
        storages = _storages(cached)
        saved.weights = sum(size for where, size in storages.items() if where not in ignored)
        for where in storages:
            saved.pop(where, None)
    return saved
