"""Checkpoints in and out: Hugging Face's files from and to Megatron's ``torch_dist``."""
