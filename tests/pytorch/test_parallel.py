"""DDP and fully_shard in two processes, against one process that goes through both ranks' batches.

The file is its own worker: each process trains as one rank, over gloo, and saves its losses and
parameters. One process that accumulates the gradients of both ranks' batches, with the keys that
the ranks draw, computes the same sums: of two gradients, so that even their order cannot differ.
"""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # in a worker there is no conftest
from block_model import batch, build, loss_of

from megatron_lowbit import convert, load_recipe
from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import compiled
from megatron_lowbit.pytorch import linear

RANKS, STEPS = 2, 2
RECIPES = {"fp8-tile": [], "nvfp4": ["bf16_blocks=none"], "mxfp4-backward": []}
# Every recipe, and either way with checkpointing and without; not in make test, the other pairs.
# Compiled blocks have the same bits.
QUICK = [
    ("ddp", "fp8-tile", True), ("ddp", "nvfp4", False), ("fsdp", "nvfp4", True),
    ("fsdp", "mxfp4-backward", False), ("compiled fsdp", "nvfp4", True),
]  # fmt: skip
OTHERS = [
    ("ddp", "mxfp4-backward", True), ("fsdp", "fp8-tile", False),
    ("compiled ddp", "mxfp4-backward", False),
]  # fmt: skip
WAYS = [*QUICK, *(pytest.param(*way, marks=pytest.mark.slow) for way in OTHERS)]


def converted(recipe: str):
    for module in (compiled, linear):
        module.select_engine = lambda device: ReferenceEngine("tests")
    model = convert(build(blocks=2), load_recipe(recipe, RECIPES[recipe]))
    return model, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)


def shard(model):
    """Shard a model's parameters, each block's by themselves, as is usual."""
    from torch.distributed.fsdp import fully_shard

    for block in model.layers:
        fully_shard(block)
    return fully_shard(model)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    gathered = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return gathered.detach().clone()


def train_as_rank(wrap: str, recipe: str, checkpointed: bool, rank: int):
    """Return this rank's losses, and the parameters afterwards."""
    model, optimizer_of = converted(recipe)
    model.reentrant = False if checkpointed else None
    names = dict(model.named_parameters())
    if "compiled" in wrap:
        for block in model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if "ddp" in wrap else shard(model)
    optimizer = optimizer_of(wrapped.parameters())
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)  # of all ranks
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch(RANKS * step + rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert [name for name, _ in model.named_parameters()] == list(names)
    return losses, {name: whole(value) for name, value in model.named_parameters()}


@cache
def train_alone(recipe: str):
    """Return the losses of each rank's batches, and the parameters afterwards."""
    losses: list[list[torch.Tensor]] = [[], []]
    with pytest.MonkeyPatch.context() as patch:
        for module in (compiled, linear):
            patch.setattr(module, "select_engine", module.select_engine)  # to restore it
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        model, optimizer_of = converted(recipe)
        optimizer = optimizer_of(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank in range(RANKS):
                patch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
                torch.manual_seed(step)
                loss = loss_of(model, batch(RANKS * step + rank))
                loss.backward()
                losses[rank].append(loss.detach())
            for parameter in model.parameters():
                parameter.grad /= RANKS
            optimizer.step()
    return losses, dict(model.named_parameters())


def work(folder: Path, ways: list, rank: int) -> None:
    """Train in several ways, one after another."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    for way in ways:
        torch.save(train_as_rank(*way, rank), folder / f"{'-'.join(map(str, way))}-{rank}.pt")
    torch.save(refusal_of_a_sharded_weight(), folder / f"refusal-{rank}.pt")
    dist.destroy_process_group()


def refusal_of_a_sharded_weight() -> str:
    """Return the error of a layer under tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, _ = converted("fp8-tile")
    parallelize_module(
        model.layers[0], init_device_mesh("cpu", (RANKS,)), {"up": ColwiseParallel()}
    )
    try:
        model(batch(0))
    except UserError as error:
        return str(error)
    return "none"


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    """Function that reads what a rank saved; the first use of each job starts its ranks."""

    @cache
    def folder(job: str) -> Path:
        made = tmp_path_factory.mktemp("ranks")
        run_ranks(__file__, RANKS, made, job, timeout=200)
        return made

    return lambda name, rank, job="QUICK": torch.load(
        folder(job) / f"{name}-{rank}.pt", weights_only=True
    )


@pytest.mark.parametrize(("wrap", "recipe", "checkpointed"), WAYS)
def test_two_ranks_train_as_one_process(wrap, recipe, checkpointed, results):
    losses, parameters = train_alone(recipe)
    for rank in range(RANKS):
        job = "QUICK" if (wrap, recipe, checkpointed) in QUICK else "OTHERS"
        theirs, after = results(f"{wrap}-{recipe}-{checkpointed}", rank, job)
        assert theirs == losses[rank]
        for name, parameter in parameters.items():
            assert torch.equal(after[name], parameter), name
    assert losses[0][-1] < losses[0][0]


def test_tensor_parallelism_is_refused(results):
    assert "the weight is a DTensor in the forward pass" in results("refusal", 1)


if __name__ == "__main__":
    work(Path(sys.argv[1]), globals()[sys.argv[2]], int(sys.argv[3]))
