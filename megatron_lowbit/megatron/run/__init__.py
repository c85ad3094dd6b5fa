"""A run: checkpoints, data, steps, errors, and workarounds for Megatron-LM."""
