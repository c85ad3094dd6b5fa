"""Attention within documents on GPUs: no token sees one of another document.

The file is its own worker.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lowbit.megatron.forward_step import _documents
from megatron_lowbit.megatron.pretrain import teardown
from tests.megatron.tiny_models import TINY, built, one_rank

# isort: split
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

LENGTH, BOUNDARIES = 128, [0, 37, 100, 128]
PADDED = {2: [0, 36, 100, 128], 4: [0, 40, 104, 128]}
"""Boundaries by the number of context parallel ranks, to multiples of twice the number."""
LINE = f"""
    {TINY} --num-layers 2 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 1024 --swiglu
    --position-embedding-type rope --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --vocab-size 512 --bf16 --quantization-engine auto --no-gradient-accumulation-fusion
    --dataloader-inter-document-masking
"""


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8-tile"])
def test_losses_of_a_document_do_not_depend_on_others(recipe):
    """Scales of fp8-tile's inputs and gradients in dgrad lie within a token."""
    with one_rank("nccl"):
        model = built(f"{LINE} --precision-recipe {recipe}", "cuda")
        tokens = torch.randint(512, (1, LENGTH), device="cuda")
        other = tokens.clone()
        first, last = slice(0, BOUNDARIES[1]), slice(BOUNDARIES[2], LENGTH)
        other[:, first] = (tokens[:, first] + 1) % 512
        masked = [losses(model, each, BOUNDARIES)[0] for each in (tokens, other)]
        assert torch.equal(masked[0][:, last], masked[1][:, last])
        assert not torch.equal(masked[0][:, first], masked[1][:, first])
        whole = [losses(model, each, [0, LENGTH])[0] for each in (tokens, other)]
        assert not torch.equal(whole[0][:, last], whole[1][:, last])
        torch.testing.assert_close(masked[0][:, first], whole[0][:, first], rtol=0, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("recipe", "atol"), [("bf16", 0.02), ("fp8-tile", 0.05), ("mxfp8", 0.05)])
def test_context_parallel_ranks_have_the_losses_of_one(recipe, atol, size, tmp_path):
    """Padded documents: other sums in attention, in BF16, and other sides of rounding thresholds.

    Two H200s differ by up to 0.034 in FP8. Ranks without a GPU of their own are another host's to
    NCCL.
    """
    for ranks in (1, size):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", str(ranks), __file__, recipe, str(size),
                   str(tmp_path)]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(command, env=environment, check=True, timeout=300)
    [alone] = tmp_path.glob("1-*.pt")
    places, expected = torch.load(alone)
    assert places.tolist() == [list(range(LENGTH))]
    parts = [torch.load(file) for file in sorted(tmp_path.glob(f"{size}-*.pt"))]
    found = torch.full_like(expected, torch.nan)
    for places, values in parts:
        found[0, places[0]] = values[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def worker(recipe: str, size: int, folder: Path) -> None:
    """Save the places and losses of this rank's tokens, of documents for ``size`` ranks."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    host, device = divmod(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    os.environ["NCCL_HOSTID"] = f"host-{host}"
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with teardown():
        padding = f"--context-parallel-size {ranks} --pad-documents-to-multiple-of {2 * ranks}"
        model = built(f"{LINE} --precision-recipe {recipe} {padding}", "cuda")
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(512, (1, LENGTH), generator=generator).cuda()
        values, places = losses(model, tokens, PADDED[size])
        torch.save((places.cpu(), values.cpu()), folder / f"{ranks}-{rank}.pt")


def losses(
    model: torch.nn.Module, tokens: torch.Tensor, boundaries: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of this rank's tokens of a sequence of documents, and their places."""
    ends = torch.tensor(boundaries, device="cuda", dtype=torch.int32)
    batch = {
        "tokens": tokens, "labels": (tokens + 7) % 512, "cu_seqlens": ends[None],
        "cu_seqlens_padded": None,
        "position_ids": torch.arange(LENGTH, device="cuda")[None],
        "max_seqlen": (ends[1:] - ends[:-1]).max(),
    }  # fmt: skip
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    documents, labels = _documents(batch, trains=False), batch["labels"]
    with torch.no_grad():
        output = model(batch["tokens"], batch["position_ids"], None, labels=labels, **documents)
    return output, batch["position_ids"]


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
