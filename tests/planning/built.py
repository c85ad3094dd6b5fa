"""Real models, built as training builds them, of one rank of any layout in this process alone.

Its other ranks are torch's fake process group: collectives return without them, so that shapes and
sizes are right and numbers are not.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings import rope_utils

from megatron_lowbit.megatron.config import _activation_fuses, transformer_config
from megatron_lowbit.megatron.layer_state import layer_states
from megatron_lowbit.megatron.models import build_model
from megatron_lowbit.megatron.rope import fused_rope
from megatron_lowbit.kernels.engine import select_engine
from megatron_lowbit.layers.saved import take_apart
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.optimizer import build_optimizer, parts, wrap_data_parallel
from tests.on_meta import OnMeta

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = ["--data-path", "unread", "--train-iters", "1", "--lr", "1", "--micro-batch-size", "1"]


def parse(text: str) -> Namespace:
    """Training's arguments; @NAME is a preset."""
    words = [f"@{EXAMPLES / word[1:]}.args" if word[0] == "@" else word for word in text.split()]
    return parse_arguments([*NEEDED, *words])


@contextmanager
def rank_of(args: Namespace, stage: int = 0, replicas: int = 1) -> Iterator[None]:
    """The first rank of a pipeline stage, in a world as large as the layout needs."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    replica = tensor * args.expert_model_parallel_size * replicas
    dist.init_process_group(
        "fake", store=FakeStore(), rank=stage * replica, world_size=replica * pipeline
    )
    new_group = dist.new_group
    # Also the groups for which megatron-core asks for gloo.
    dist.new_group = lambda *places, **options: new_group(*places, **options | {"backend": None})
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        dist.new_group = new_group
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def state_bytes(args: Namespace, vocabulary: int, replicas: int) -> dict[str, int]:
    """Bytes of a rank's weights, main gradients and optimizer after a step, BF16."""
    args.global_batch_size = replicas
    with rank_of(args, replicas=replicas):
        config = transformer_config(args, torch.bfloat16)
        model = wrap_data_parallel(args, config, _build(args, vocabulary, config))
        optimizer, _ = build_optimizer(args, config, model)
        model[0].zero_grad_buffer()
        optimizer.step()
        parameters = list(model[0].parameters())
        states = []
        for part in parts(optimizer):
            for main in (p for group in part.optimizer.param_groups for p in group["params"]):
                moments = (part.optimizer.state[main][key] for key in ("exp_avg", "exp_avg_sq"))
                states += [main, *moments]
        weights = _storages(parameters)
        # An FP32 parameter is its own main parameter.
        states = {where: n for where, n in _storages(states).items() if where not in weights}
        gradients = _storages(p.main_grad for p in parameters)
        found = {"weights": weights, "main gradients": gradients, "optimizer": states}
        return {name: sum(sizes.values()) for name, sizes in found.items()}


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the tensors' storages by address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def parameter_count(args: Namespace, vocabulary: int, stage: int = 0) -> int:
    """Parameters of a rank, as training's first lines print them; the weights take no memory."""
    with rank_of(args, stage), OnMeta():
        (chunk,) = _build(args, vocabulary, transformer_config(args, torch.float32))
    return sum(parameter.numel() for parameter in chunk.parameters())


def _build(args: Namespace, vocabulary: int, config) -> list[torch.nn.Module]:
    engine = select_engine(torch.device("cpu"), "reference")
    recipe = load_recipe(*args.recipes, args.recipe_set)
    return build_model(args, config, recipe, engine, vocabulary)


class _FusedRMSNorm(torch.autograd.Function):
    """What torch's RMSNorm keeps on a GPU; a CPU's keeps FP32 copies (derivatives.yaml)."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale)
        return (x.float() * scale).to(x.dtype) * weight


class Saved(dict):
    """Bytes of the storages that forward saved, by address; ``weights`` of the cached ones."""

    weights = 0


def saved_bytes(args: Namespace, vocabulary: int, monkeypatch) -> Saved:
    """What forward saves for backward, each storage once, without parameters: bytes by address.

    The model computes in BF16 and through the functions that it has on a GPU.
    """
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", fused_rope)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", _FusedRMSNorm.apply)
    with rank_of(args), torch.compiler.set_stance("force_eager"):
        config = transformer_config(args, torch.bfloat16)
        config.apply_rope_fusion = args.position_embedding_type == "rope"
        config.bias_activation_fusion = _activation_fuses(args)
        config.bias_dropout_fusion = True
        (model,) = _build(args, vocabulary, config)
        ignored = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found, alive = Saved(), []

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in ignored and storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # or another would get its address
            return tensor

        shape = args.micro_batch_size, args.seq_length
        tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
        positions = torch.arange(args.seq_length).expand(shape)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, positions, attention_mask=None, labels=tokens)
        cached: list[torch.Tensor] = []
        for state in layer_states([model]):
            for operand in state.weight_cache.operands or ():
                take_apart(operand, cached)
        storages = _storages(cached)
        found.weights = sum(size for where, size in storages.items() if where not in ignored)
        for where in storages:
            found.pop(where, None)
    return found
