"""Checkpoints in layouts that pad the vocabulary to different sizes, to the bit."""

import pytest
import torch
from tiny_run import done, saved_tensors

VOCABULARY = 512
# Padded to 560 on one rank, 640 on two.
MODEL = ("--num-layers", 1, "--make-vocab-size-divisible-by", 80, "--train-iters", 2)
SPLIT = ("--tensor-model-parallel-size", 2)
OPTIMIZERS = {
    "plain": (),
    "distributed": ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_padding_may_differ(pretrain_here, pretrain_ranks, tmp_path, optimizer):
    model = (*MODEL, *optimizer)
    done(pretrain_here(*model, "--save", tmp_path / "one"))
    passed_on = ("--load", tmp_path / "one", "--save", tmp_path / "two")
    pretrain_ranks({"two": (*model, *SPLIT, *passed_on)})
    done(pretrain_here(*model, "--load", tmp_path / "two", "--save", tmp_path / "back"))
    one, two, back = (saved_tensors(tmp_path / name / "iter_0000002")
                      for name in ("one", "two", "back"))  # fmt: skip
    assert one.keys() == two.keys() == back.keys()
    padded = 0
    for key, tensor in one.items():
        if not ("word_embeddings" in key or "output_layer" in key):
            assert torch.equal(tensor, two[key])
            assert torch.equal(tensor, back[key])
            continue
        padded += 1
        assert (len(tensor), len(two[key]), len(back[key])) == (560, 640, 560)
        for other in (two[key], back[key]):
            assert torch.equal(other[:VOCABULARY], tensor[:VOCABULARY])
    # Two matrices, each with two moments; the distributed optimizer keeps FP32 copies too.
    assert padded in (6, 8)
