"""The rooms that know another framework: Megatron Core, Transformer Engine."""
