"""The kernel, by ranks that are processes: bits of the reference, and ends for what goes wrong.

Without a GPU the ranks share a file and run the kernel in Triton's interpreter, waits and all. The
file is its own worker.
"""

import sys
from pathlib import Path

import pytest
import torch
from expected import bits, expected

from megatron_lowbit.collectives.all_reduce_norm import NEW, Result
from megatron_lowbit.collectives.launch import SymmetricBuffer, buffer_bytes, launch, reason
from megatron_lowbit.numerics import FORMATS, Quantizer, Request
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm

ROOM = 2**18
POLLS = 20_000
FORMAT_NAMES = ["mxfp8-e4m3", "mxfp4", "nvfp4", "fp8-1x128-e4m3", "fp8-row-e4m3"]


def shared_area(file: Path | str, rank: int, ranks: int) -> SymmetricBuffer:
    """Return a symmetric buffer over a file, which is made of zeros if it is missing."""
    size = buffer_bytes(ranks, ROOM)
    memory = torch.from_file(str(file), shared=True, size=ranks * size, dtype=torch.uint8)
    addresses = torch.tensor([memory.data_ptr() + size * r for r in range(ranks)])
    return SymmetricBuffer(addresses, rank, ROOM, torch.zeros(4, dtype=torch.int64), memory)


def call(buffer, xs, residual, norm, gain=None, name=None, keep=(False, True), path=None,
         limit=POLLS, out=NEW):  # fmt: skip
    request = None if name is None else Request(Quantizer(FORMATS[name]), needs_codes=True)
    return launch(buffer, xs[buffer.rank], residual, norm, gain, request, keep, path, limit, out)


def cases(draws, ranks):
    """Return everything that a call can be asked for, with sizes at random."""
    for path in ("one-stage", "compact", "gathered"):
        for name in (None, *FORMAT_NAMES):
            for norm in (RMSNorm(), MXNorm()):
                has_blocks = name is not None and FORMATS[name].block > 1
                gathers_codes = name is not None and not FORMATS[name].tensor_scaled
                if (not has_blocks and isinstance(norm, MXNorm)) or (
                    path == "compact" and not gathers_codes
                ):
                    continue
                rows = int(torch.randint(1, 24, (), generator=draws))
                columns = 128 * (1 + rows % 3)
                dtype = (torch.float32, torch.bfloat16, torch.float16)[rows % 3]
                xs = torch.randn(ranks + 1, rows, columns, generator=draws).to(dtype)
                gain = torch.randn(columns, generator=draws).to(dtype)
                residual = xs[ranks] if rows % 2 else None
                yield path, name, norm, list(xs[:ranks]), residual, gain


def agree(buffer) -> None:
    """Run cases one after another in the same memory: most with two ranks, a few with eight."""
    draws = torch.Generator().manual_seed(3)
    for number, case in enumerate(cases(draws, buffer.ranks)):
        if not {2: number % 3 < 2, 3: number % 3 == 2, 8: number % 8 == 0}[buffer.ranks]:
            continue
        path, name, norm, xs, residual, gain = case
        gain = None if isinstance(norm, MXNorm) else gain
        quantizer = None if name is None else Quantizer(FORMATS[name])
        keep_rows = path != "compact" and number % 2 == 0
        wanted = expected(xs, residual, norm, gain, quantizer, keep_rows)
        if path == "compact":
            wanted = wanted._replace(total=None)
        keep = keep_rows, path != "compact"
        seen = call(buffer, xs, residual, norm, gain, name, keep, path)
        where = (path, name, norm, tuple(xs[0].shape), xs[0].dtype)
        assert equal(seen, wanted), where
        # Into the tensors of the call before, emptied.
        for tensor in bits(seen):
            tensor.fill_(1)
        again = call(buffer, xs, residual, norm, gain, name, keep, path, out=seen)
        assert equal(again, wanted) and equal(seen, wanted), where
    assert not buffer.fault.any()


def equal(seen, wanted) -> bool:
    return all(map(torch.equal, *(bits(one) for one in (seen, wanted))))


def gather(buffer) -> None:
    """Check that gathered rows take 33/32 bytes per element as codes and scales, 4 as FP32 sums.

    The buffer begins as zeros, and no byte that is written into it is 0.
    """
    rows, columns = 64, 128
    xs = [torch.full((rows, columns), 1.2345678)] * 2
    for path in ("gathered", "compact"):
        keep = False, path == "gathered"
        call(buffer, xs, None, RMSNorm(), name="mxfp8-e4m3", keep=keep, path=path)
    own = buffer.owner.view(2, -1)[buffer.rank, buffer.data :]
    sent = {half.count_nonzero().item() for half in own.view(2, -1)}
    assert sent == {rows // 2 * columns * (4 + size) for size in (4, 33 / 32)}


def die(buffer) -> None:
    """Check a third call to which the last rank does not come: the result is no number."""
    xs = list(torch.ones(buffer.ranks, 4, 128))
    for _ in range(2):
        call(buffer, xs, None, RMSNorm())
    if buffer.rank == buffer.ranks - 1:
        return
    for _ in range(3):  # no later call waits
        seen = call(buffer, xs, None, RMSNorm(), limit=500)
        assert seen.normalized.isnan().all() and seen.total.isnan().all()
    late = f"rank {buffer.ranks - 1} of the group did not come to a call with 4 x 128 in time"
    assert reason(buffer) == late


def differ(buffer) -> None:
    """Check that both ranks name both shapes where one has other rows, then others."""
    rows = (4, 40)[buffer.rank]
    xs = list(torch.ones(buffer.ranks, rows, 128))
    call(buffer, xs, None, RMSNorm())
    other = 1 - buffer.rank
    assert reason(buffer) == (
        f"rank {other} of the group came with {(4, 40)[other]} x 128, rank {buffer.rank} with "
        f"{rows} x 128"
    )


def differ_in_path(buffer) -> None:
    xs = list(torch.ones(buffer.ranks, 4, 128))
    call(buffer, xs, None, RMSNorm(), path=("one-stage", "gathered")[buffer.rank])
    assert "another norm, output, path or dtype" in reason(buffer)


def give_up(buffer) -> None:
    """Check that rank 1, which comes when rank 0 no longer waits, is told at the next call."""
    xs = list(torch.ones(buffer.ranks, 4, 128))
    tell = buffer.owner[-1:]
    while buffer.rank == 1 and not tell.item():
        pass
    for _ in range(2):
        call(buffer, xs, None, RMSNorm(), limit=500)
    if buffer.rank == 1:
        assert reason(buffer) == "rank 0 of the group had given up an earlier call"
    tell.fill_(1)


def test_a_buffer_that_does_not_fit(tmp_path):
    """A kernel would write to the address of a buffer elsewhere, or codes under a wrong name."""
    buffer, x = shared_area(tmp_path / "buffer", 0, 1), torch.ones(4, 128)
    elsewhere = Result(normalized=torch.empty_like(x, device="meta"))
    with pytest.raises(ValueError, match=r"^out\.normalized: it is on meta, x on cpu$"):
        call(buffer, [x], None, RMSNorm(), out=elsewhere)
    other = Quantizer(FORMATS["mxfp6-e2m3"])(x)
    with pytest.raises(ValueError, match=r"^out\.quantized: its format is .*, the call's "):
        call(buffer, [x], None, RMSNorm(), name="mxfp6-e3m2", out=Result(quantized=other))


@pytest.mark.parametrize(
    ("path", "name", "keeps_sum"),
    [("compact", "mxfp8-e4m3", True), ("two-stage", None, True), ("compact", "tetrajet2", False)],
)
def test_a_path_that_does_not_fit(tmp_path, path, name, keeps_sum):
    """Codes are gathered where nobody wants the sum, with one scale per block."""
    buffer, keep = shared_area(tmp_path / "buffer", 0, 1), (False, keeps_sum)
    with pytest.raises(ValueError, match=f"path '{path}' of this call is none of one-stage, gath"):
        call(buffer, [torch.ones(4, 128)], None, RMSNorm(), name=name, keep=keep, path=path)


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        ("agree", 2),
        pytest.param("agree", 3, marks=pytest.mark.slow),
        pytest.param("agree", 8, marks=pytest.mark.slow),
        ("gather", 2),
        pytest.param("die", 2, marks=pytest.mark.slow),
        ("differ", 2),
        pytest.param("differ_in_path", 2, marks=pytest.mark.slow),
        pytest.param("give_up", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks(run_ranks, tmp_path, what, ranks):
    file = tmp_path / "buffer"
    shared_area(file, 0, ranks)
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run_ranks(__file__, ranks, what, file, ranks, timeout=300, **settings)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    test, file, ranks, rank = sys.argv[1:]
    globals()[test](shared_area(file, int(rank), int(ranks)))
