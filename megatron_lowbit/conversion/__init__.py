"""Checkpoints in and out: Hugging Face's files from and to Megatron-LM's ``torch_dist``."""
