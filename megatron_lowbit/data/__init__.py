"""Text to tokenized datasets in the format of Megatron-LM."""
