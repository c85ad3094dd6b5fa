"""Files of checkpoints, of Megatron-LM and of Hugging Face: read, write, inspect, average."""
