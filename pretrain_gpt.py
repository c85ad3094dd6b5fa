"""Pretrain a GPT in low precision: ``pretrain_gpt.py --fp4-recipe nvfp4 ...``."""

from megatron_lowbit.commands import pretrain

# Megatron-LM's checkpoint writers and data loaders start processes that import this file anew.
if __name__ == "__main__":
    pretrain(hybrid=False)
