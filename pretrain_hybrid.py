"""Pretrain a Mamba-Transformer hybrid in low precision."""

from megatron_lowbit.commands import pretrain

# Megatron-LM's checkpoint writers and data loaders start processes that import this file anew.
if __name__ == "__main__":
    pretrain(hybrid=True)
