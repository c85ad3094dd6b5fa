"""A process that trains several times, as studies and these tests do."""

import os

from tiny_run import done

ONE_GROUP = 3
"""Threads of a process group of gloo: of each run Megatron-LM keeps the default one."""


def test_a_run_takes_its_process_groups_with_it(pretrain_here):
    threads = []
    for _ in range(2):
        done(pretrain_here("--train-iters", 1, "--use-distributed-optimizer"))
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[1] <= threads[0] + ONE_GROUP
