"""On two GPUs and four: the operation under random calls, streams, graphs; what ends a wrong one.

The file is its own worker.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expected import bits, expected

from megatron_lowbit.collectives.all_reduce_norm import AllReduceNorm, AllReduceNormError
from megatron_lowbit.numerics import FORMATS, Quantizer, Request
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm

CALLS, AGAIN = {2: 10_000, 4: 2_000}, 5
CAPACITY = 2**24
TIME_LIMIT_S = 3.0
KINDS = [
    (None, RMSNorm(), True),
    (None, RMSNorm(), False),
    ("fp8-1x128-e4m3", RMSNorm(), True),
    ("mxfp8-e4m3", MXNorm(), True),
    ("mxfp4", RMSNorm(), False),
    ("nvfp4", MXNorm(), True),
]
"""Format, norm, whether with a residual: each is two kernels or more to compile."""


def draw_call(draws, data, ranks):
    """Return tensors of all ranks and arguments of a random call, the same on every rank."""

    def pick(most: int) -> int:
        return int(torch.randint(most, (), generator=draws))

    hidden = (1024, 4096)[pick(2)]
    rows = 1 + pick((8, 64, 300)[pick(3)])
    name, norm, added = KINDS[pick(len(KINDS))]
    # Also where no 16 bytes are aligned.
    step = 8 if added else 1
    size = (ranks + 1) * rows * hidden
    at = step * pick((data.shape[1] - size) // step)
    tensors = data[0, at : at + size].view(ranks + 1, rows, hidden)
    request = None if name is None else Request(Quantizer(FORMATS[name]), needs_codes=True)
    gain = None if isinstance(norm, MXNorm) else data[1, at : at + hidden]
    residual = tensors[ranks] if added else None
    path = (None, "one-stage", "gathered")[pick(3)]
    return list(tensors[:ranks]), residual, norm, gain, request, path, pick(3)


def agree(run: AllReduceNorm, rank: int) -> None:
    """Check random calls, AGAIN times each, on streams at random, against the reference's bits."""
    draws = torch.Generator().manual_seed(11)
    torch.manual_seed(5)  # of the GPU as well: all ranks have the same data
    data = torch.randn(2, 2**23, device="cuda").bfloat16()
    halves = data.half()
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    calls = CALLS[run.group.size()]
    for number in range(calls // AGAIN):
        xs, residual, norm, gain, request, path, stream = draw_call(
            draws, (data, halves)[number % 2], run.group.size()
        )
        keep = request is not None and len(xs[0]) % 2 == 0
        seen = []
        with torch.cuda.stream(streams[stream]):
            for _ in range(AGAIN):
                result = run(
                    xs[rank], residual, norm, gain, request, keep_normalized=keep, path=path
                )
                seen.append(bits(result))
            quantizer = request and request.quantizer
            wanted = bits(expected(xs, residual, norm, gain, quantizer, keep))
            for one in seen:
                for part, other in zip(one, wanted, strict=True):
                    wrong += (part != other).any()
            streams[stream].synchronize()
    torch.cuda.synchronize()
    run.check()
    assert wrong.item() == 0, f"{wrong.item()} of {calls} calls differ"


def replay(run: AllReduceNorm, rank: int) -> None:
    """Check that a captured graph gives the same for new numbers, and grows no memory."""
    torch.manual_seed(5)
    xs, new = torch.randn(2, run.group.size(), 64, 4096, device="cuda").bfloat16().unbind()
    x, graph, stream = xs[rank].clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(x, None, RMSNorm())
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                result = run(x, None, RMSNorm())
    before = torch.cuda.memory_allocated()
    for numbers in (xs, new, xs):
        x.copy_(numbers[rank])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        wanted = bits(expected(list(numbers), None, RMSNorm(), None, None))
        assert all(map(torch.equal, bits(result), wanted))
        del wanted
    assert torch.cuda.memory_allocated() == before
    run(torch.zeros(CAPACITY // 4096, 4096, device="cuda"), None, RMSNorm())  # buffers grow
    x.copy_(new[rank])
    graph.replay()
    torch.cuda.synchronize()
    wanted = bits(expected(list(new), None, RMSNorm(), None, None))
    assert all(map(torch.equal, bits(result), wanted))
    run.check()


def die(run: AllReduceNorm, rank: int) -> None:
    """Check that the others get an error, and no number, if the last rank ends silently."""
    x = torch.ones(8, 1024, device="cuda")
    run(x, None, RMSNorm())
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    result = run(x, None, RMSNorm())
    torch.cuda.synchronize()
    assert result.normalized.isnan().all()
    with pytest.raises(AllReduceNormError, match=r"rank 1 .* did not come to a call with 8 x 1024"):
        run(x, None, RMSNorm())
    os._exit(0)  # without a farewell to the rank that is gone


def differ(run: AllReduceNorm, rank: int) -> None:
    """Check that both ranks name both shapes where one has another."""
    rows = (8, 200)[rank]
    run(torch.ones(rows, 1024, device="cuda"), None, RMSNorm())
    torch.cuda.synchronize()
    other = 1 - rank
    named = f"rank {other} of the group came with {(8, 200)[other]} x 1024, rank {rank} with {rows}"
    with pytest.raises(AllReduceNormError, match=named):
        run.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("what", "ranks"), [("agree", 2), ("agree", 4), ("replay", 2), ("die", 2), ("differ", 2)]
)
def test_ranks(run_ranks, tmp_path, what, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"fewer than {ranks} GPUs")
    run_ranks(__file__, ranks, what, tmp_path / "rendezvous", ranks, timeout=400)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    test, file, count, number = sys.argv[1:]
    torch.cuda.set_device(int(number))
    dist.init_process_group(
        "nccl", init_method=f"file://{file}", rank=int(number), world_size=int(count)
    )
    operation = AllReduceNorm(dist.group.WORLD, CAPACITY, TIME_LIMIT_S)
    assert f"shared memory of {count} GPUs" in operation.choice
    globals()[test](operation, int(number))
    dist.destroy_process_group()
