"""MXNormLinear in two processes against the same layer in one. The file is its own worker."""

import sys

import torch
import torch.distributed as dist

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import UNSHARDED, LinearContext, Shards
from megatron_lowbit.layers.mxnorm import mxnorm_linear
from megatron_lowbit.recipes import load_precision, load_recipe

RANKS, TOKENS, N, K = 2, 64, 64, 128
RECIPES = {
    "mxfp8": (),
    "nvfp4": ("tensor_scale=group", "bf16_blocks=none"),  # random numbers, transforms
}


def layer(recipe, tensors, grad, shards=UNSHARDED):
    """Return Y, dX, dgain, dW."""
    precision = load_precision(load_recipe(recipe, RECIPES[recipe]))
    tensors = [tensor.detach().contiguous().requires_grad_() for tensor in tensors]
    context = LinearContext(precision, ReferenceEngine("tests"), key=5, shards=shards)
    y = mxnorm_linear(*tensors, context)
    return y.detach(), *torch.autograd.grad(y, tensors, grad.contiguous())


def worker(rendezvous: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    draws = torch.Generator().manual_seed(7)
    x, gain, weight, grad = (
        torch.randn(shape, generator=draws) for shape in ((TOKENS, K), (K,), (N, K), (TOKENS, N))
    )
    weight[: N // 4] *= 5  # shards of other sizes
    features = torch.arange(N).chunk(RANKS)[rank]
    tokens = torch.arange(TOKENS).chunk(RANKS)[rank]
    group = dist.group.WORLD
    for recipe in RECIPES:
        whole = layer(recipe, (x, gain, weight), grad)
        for sequence_parallel in (False, True):
            mine = tokens if sequence_parallel else slice(None)
            roles = {"weight", "grad"} | ({"input"} if sequence_parallel else set())
            shards = Shards(
                group, frozenset(roles), out_features=features,
                sequence_parallel=sequence_parallel, allreduce_dgrad=not sequence_parallel,
            )  # fmt: skip
            y, dx, dgain, dw = layer(
                recipe, (x[mine], gain, weight[features]), grad[:, features], shards
            )
            if sequence_parallel:  # summed with those of other norms, later
                dist.all_reduce(dgain)
            expected = (whole[0][:, features], whole[1][mine], whole[2], whole[3][features])
            names = ("y", "dx", "dgain", "dw")
            for name, one, other in zip(names, (y, dx, dgain, dw), expected, strict=True):
                error = (one - other).abs().max() / other.abs().max()
                assert error <= 2e-5, (recipe, sequence_parallel, name, error)
    dist.destroy_process_group()


def test_two_ranks_are_one(run_ranks, tmp_path):
    run_ranks(__file__, RANKS, tmp_path / "rendezvous", timeout=100)


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]))
