"""Pretraining run with a gradient that is not finite in the fourth iteration."""

from argparse import Namespace

import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron
from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.run.steps import steps_of
from tests.short_runs import fork_results_queue, without_pictures

FAULTY = 4


def spoiled(args: Namespace):
    """Return a hook that sets a gradient to NaN in an iteration."""

    def hook(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        now = []
        steps_of(args, chunks).listeners.append(lambda iteration, _: now.append(iteration + 1))
        # Hooks see no gradient of a linear layer, which goes to the main gradient by itself.
        weight = chunks[0].decoder.final_layernorm.weight
        weight.register_hook(lambda grad: grad * torch.nan if now[-1] == FAULTY else None)
        return chunks

    return hook


def main() -> None:
    fork_results_queue()
    run = pretrain.run
    pretrain.run = lambda args: run(args, [spoiled(args)])
    with without_pictures():
        pretrain.main(hybrid=False)


if __name__ == "__main__":
    exit_on_user_error(main)
