"""Pretraining run with a gradient that is not finite: ``faulty_run.py ITERATION ...``.

The iteration is counted from 1. The arguments of the run follow it.
"""

import sys
from argparse import Namespace

import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron
from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.steps import steps_of


def spoiled(args: Namespace, faulty: int):
    """Return a hook that sets a gradient to NaN in an iteration."""

    def hook(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        now = []
        steps_of(args, chunks).listeners.append(lambda iteration, _: now.append(iteration + 1))
        weight = chunks[0].decoder.layers[0].mlp.linear_fc1.weight
        weight.register_hook(lambda grad: grad * torch.nan if now[-1] == faulty else None)
        return chunks

    return hook


def main() -> None:
    faulty, run = int(sys.argv.pop(1)), pretrain.run
    pretrain.run = lambda args: run(args, [spoiled(args, faulty)])
    pretrain.main(hybrid=False)


if __name__ == "__main__":
    exit_on_user_error(main)
