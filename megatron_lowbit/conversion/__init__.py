"""Conversion of checkpoints between Hugging Face's files and Megatron-LM's ``torch_dist``."""
