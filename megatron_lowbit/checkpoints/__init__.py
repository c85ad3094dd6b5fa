"""Reading and writing of whole checkpoints, above the Megatron-LM integration."""
