"""Several runs in one process, as in studies and in these tests."""

import os

from tiny_run import done


def test_a_run_takes_its_process_groups_with_it(pretrain_here):
    threads = []
    for _ in range(2):
        done(pretrain_here("--train-iters", 1, "--use-distributed-optimizer"))
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[1] == threads[0]


def test_experts_in_more_layers_than_before(pretrain_here):
    """Megatron-LM allocates its record of auxiliary losses for the layers of the first run."""
    experts = ("--num-experts", 2, "--moe-ffn-hidden-size", 32, "--moe-aux-loss-coeff", 0.01,
               "--moe-router-load-balancing-type", "aux_loss", "--train-iters", 1)  # fmt: skip
    for layers in (1, 2):
        done(pretrain_here(*experts, "--num-layers", layers))
